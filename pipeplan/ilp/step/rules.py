"""Rules to begin with: every op ranks by when it could run first, weight gradients later.

A micro-batch that never waits keeps a stage's bytes for its *stay*, from F to the end of B or I.
At one micro-batch per load, stay / load of them are in flight; limits near that keep memories
small without slowing the flow (compare Qi et al. 2024, controllable memory).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import ceil
from typing import Final

from pipeplan.ilp.step.instance import StepInstance
from pipeplan.ilp.step.list_scheduler import DispatchingRule

SPACINGS: Final = (1.0, 0.5)
"""Between micro-batches, in loads: 1 keeps a periodic order, less takes what is farther along."""
LATENESS: Final = (4.0, 2.0, 0.5, 0.0)
"""How far weight gradients rank behind their input gradients, in loads."""
PATIENCE: Final = (0.05, 0.25, 0.5, 1.0)
"""In lengths of the shortest op."""
STRETCHES: Final = (0.8, 1.0, 1.25, 1.5, 2.0, 3.0)
"""In-flight limits in stays / load; beside these there are none."""


def initial_rules(of: StepInstance) -> Iterator[DispatchingRule]:
    """All combinations of the values above."""
    ranks, stays = _ranks(of)
    load, shortest = max(1, of.load_ns), shortest_op(of)
    none = (of.microbatches,) * len(of.stages)
    limits = [none] + [
        tuple(min(of.microbatches, max(1, ceil(stay * stretch / load - 0.01))) for stay in stays)
        for stretch in STRETCHES
    ]
    lateness = LATENESS if any(of.weight) else (0.0,)
    for limit, spacing, late, patience in product(
        dict.fromkeys(limits), SPACINGS, lateness, PATIENCE
    ):
        weights = tuple(rank + late * load for rank in ranks[2])
        yield DispatchingRule(
            (ranks[0], ranks[1], weights), spacing * load, limit, int(patience * shortest)
        )


def shortest_op(of: StepInstance) -> int:
    """Ns of the shortest F, B or I that takes any."""
    return min((each for each in (*of.forward, *of.backward) if each), default=0)


def _ranks(
    of: StepInstance,
) -> tuple[tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]], list[int]]:
    """When F, B or I, and W of micro-batch 0 could run alone; how long it stays in each stage."""
    stages, now = range(len(of.stages)), 0
    forward, backward = [0] * len(of.stages), [0] * len(of.stages)
    for stage in stages:
        forward[stage] = now
        hop = of.outward[stage]
        now += of.forward[stage] + (hop.ns if hop else 0)
    for stage in reversed(stages):
        backward[stage] = now
        hop = of.homeward[stage]
        now += of.backward[stage] + (hop.ns if hop else 0)
    weight = [backward[stage] + of.backward[stage] for stage in stages]
    stays = [weight[stage] - forward[stage] for stage in stages]
    return (tuple(forward), tuple(backward), tuple(weight)), stays
