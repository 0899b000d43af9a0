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

from pipeplan.ilp.compiled import Bools, Ints, compiled
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
    starts = np.empty(len(in_turn), np.int64)
    lines = of.lines
    gpus, ns, hops = lines["gpu"], lines["ns"], lines["hop_ns"]
    _place(period, np.array(in_turn), gpus, ns, hops, again, late, starts)
    times: list[list[float]] = starts.reshape(3, stages).astype(np.float64).tolist()
    return times


@compiled
def _place(
    period: int,
    in_turn: Ints,
    gpus: Ints,
    ns: Ints,
    hops: Ints,
    again: Bools,
    late: int,
    starts: Ints,
) -> None:
    """Give each line a place that is free on its GPU.

    Args:
        period: in ns.
        in_turn: lines, those of F and B as a micro-batch passes them.
        gpus: by line.
        ns: by line, of an op.
        hops: by line, what its output takes to the next one, in ns.
        again: by turn, whether the second place is taken.
        late: how far W is behind B, in ns.
        starts: by line, in ns; filled in. Where nothing is free, what would be the best.
    """
    stages = in_turn.size // 3
    placed = np.zeros(in_turn.size, np.bool_)
    now = 0
    for turn in range(in_turn.size):
        line = in_turn[turn]
        if line >= W * stages:
            now = starts[line - stages] + ns[line - stages] + late
        start = _free(period, in_turn[:turn], gpus, ns, starts, placed, line, now)
        if start >= now and again[turn]:
            start = _free(period, in_turn[:turn], gpus, ns, starts, placed, line, start + ns[line])
        placed[line] = start >= now
        starts[line] = max(start, now)
        now = starts[line] + ns[line] + hops[line]


@compiled
def _free(
    period: int,
    others: Ints,
    gpus: Ints,
    ns: Ints,
    starts: Ints,
    placed: Bools,
    line: int,
    now: int,
) -> int:
    """As `ReservationTable.earliest_fit`, which machine code cannot call; -1 if none is free."""
    start, moved = now, True
    while moved and start < now + period:
        moved = False
        for other in others:
            if gpus[other] != gpus[line] or not placed[other]:
                continue
            ahead, behind = (starts[other] - start) % period, (start - starts[other]) % period
            if ahead < ns[line] or behind < ns[other]:
                # Where the other one ends just here, it begins too soon again: nothing is free.
                start += (starts[other] + ns[other] - start) % period or period
                moved = True
    return -1 if moved or ns[line] > period else start
