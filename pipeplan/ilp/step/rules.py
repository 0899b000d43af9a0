"""Rules to begin with: the ranks are the times of a steady state, drawn at random.

A *steady state* is the modulo schedule (Rau 1994) of one micro-batch per period: each op takes the
first place that is free on its GPU, in the order in which a micro-batch passes; sometimes the
second one, for variety. List scheduling by such ranks gives the same order wherever all GPUs are
busy, and fills and drains on its own (compare the building blocks of Qi et al. 2024). Source:
ours.
"""

from __future__ import annotations

from math import ceil
from random import Random
from typing import Final

import numpy as np

from pipeplan.ilp.modulo_scheduling import place_in_turn
from pipeplan.ilp.step.dispatch import B, W
from pipeplan.ilp.step.instance import StepInstance
from pipeplan.ilp.step.list_scheduler import DispatchingRule

PERIODS: Final = (1.0, 1.0, 1.02, 1.1)
"""Of the steady state, in loads: a longer one finds free places sooner."""
SECOND_PLACE: Final = (0.0, 0.15, 0.3, 0.5)
"""How likely an op takes the second free place."""
LATENESS: Final = (0.0, 0.5, 2.0, 4.0)
"""How far weight gradients rank behind their input gradients, in periods."""
PATIENCE: Final = (0.05, 0.25, 0.5, 1.0)
"""In lengths of the shortest op."""
STRETCHES: Final = (None, 1.0, 1.0, 1.25, 1.5, 2.0)
"""In-flight limits, in micro-batches of the steady state; None: there are none."""
SPACINGS: Final = (1.0, 1.0, 0.5)
"""Between micro-batches, in periods: 1 keeps the order, less takes what is farther along."""


def random_rule(of: StepInstance, random: Random) -> DispatchingRule:
    """Ranks of a random steady state, with limits near what it has in flight."""
    period = max(1, int(of.load_ns * random.choice(PERIODS)))
    forward, backward, weight = _steady_state(of, period, random)
    stretch = random.choice(STRETCHES)
    limits = [of.microbatches] * len(of.stages)
    if stretch is not None:
        for stage, lasts in enumerate(of.backward):
            stay = backward[stage] + lasts - forward[stage]
            limits[stage] = min(of.microbatches, max(1, ceil(stay * stretch / period)))
    return DispatchingRule(
        ranks=(tuple(forward), tuple(backward), tuple(weight)),
        spacing=random.choice(SPACINGS) * period,
        in_flight=tuple(limits),
        patience=int(random.choice(PATIENCE) * shortest_op(of)),
    )


def shortest_op(of: StepInstance) -> int:
    """Ns of the shortest F, B or I that takes any."""
    return min((each for each in (*of.forward, *of.backward) if each), default=0)


def _steady_state(of: StepInstance, period: int, random: Random) -> list[list[float]]:
    """Start times of F, of B or I, and of W by stage."""
    stages = len(of.stages)
    second = random.choice(SECOND_PLACE)
    late = int(random.choice(LATENESS) * period)
    in_turn = [
        *range(stages),
        *reversed(range(B * stages, W * stages)),
        *random.sample(range(W * stages, 3 * stages), stages),
    ]
    again = np.array([random.random() < second for _ in in_turn])
    lines = of.lines
    gpus, ns, hops = lines["gpu"], lines["ns"], lines["hop_ns"]
    starts = place_in_turn(period, np.array(in_turn), gpus, ns, hops, again, late)
    times: list[list[float]] = starts.reshape(3, stages).astype(np.float64).tolist()
    return times
