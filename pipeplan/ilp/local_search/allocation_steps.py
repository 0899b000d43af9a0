"""Annealing over allocations as machine code: step by step, from hot to cold.

An allocation is five arrays: the GPU of each layer; whether a stage is split off before a layer
though it stays on the GPU; by first layer of a stage, the waits after its F and before its B, in
periods; when the copies' turns lie, in periods, rising from 0; how each layer runs (`layer_ways`),
or nothing where all keep all.
"""

from __future__ import annotations

from math import exp

from pipeplan.ilp.compiled import Floats, Ints, Records, compiled
from pipeplan.ilp.local_search.allocation_judge import judge
from pipeplan.ilp.local_search.allocation_moves import make_step
from pipeplan.ilp.local_search.layer_ways import ENDS, OPTIONS

HOMES, CUTS, WAITS, TURNS, WAYS = range(5)
"""What an allocation is."""


@compiled
def walk(
    chain: tuple[Ints, ...],
    by_way: tuple[Ints, Ints, Ints],
    host: Floats,
    stages: Records,
    at: tuple[Ints, Ints, Floats, Floats, Ints],
    new: tuple[Ints, Ints, Floats, Floats, Ints],
    closest: tuple[Ints, Ints, Floats, Floats, Ints],
    excesses: Floats,
    period: int,
    draws: Floats,
    heats: Floats,
    judged: bool,
    enough: int,
) -> tuple[int, int, bool]:
    """Anneal until a step's schedule fits as far as estimated, or until there are no more steps.

    Args:
        chain: what `chain_arrays` makes of it.
        by_way: as for `judge`.
        host: as for `judge`.
        stages: room for as many as there are layers.
        at: the allocation that the next step changes; is changed.
        new: that of the last step; is changed.
        closest: the one with the least excess; is changed.
        excesses: of the three, as shares of a GPU's memory; changed with them.
        period: of all copies, in ns.
        draws: random numbers from 0 to 1, `DRAWS` for each step, `RUN_DRAWS` where runs change.
        heats: by step, the excess that it accepts with probability 1/e.
        judged: whether the first step is made and judged already, so that `excesses` has what it
            came to: it is accepted or not.
        enough: after so many copies of stages that were placed no other step begins.

    Returns:
        How many steps are done, and how many copies of stages were placed; whether one more step
        is made, which has no excess by the estimate.
    """
    placed = 0
    for step in range(len(draws)):
        row = draws[step]
        if step > 0 or not judged:
            _copy(at, new)
            make_step(new, chain, by_way[ENDS][OPTIONS], row)
            excesses[1], stages_placed = judge(chain, by_way, host, stages, new, period)
            placed += stages_placed
            if excesses[1] <= 0:
                return step, placed, True
        behind = excesses[1] - excesses[0]
        if behind <= 0 or row[-1] < exp(-behind / heats[step]):
            _copy(new, at)
            excesses[0] = excesses[1]
            if excesses[0] < excesses[2]:
                _copy(at, closest)
                excesses[2] = excesses[0]
        if placed >= enough:
            return step + 1, placed, False
    return len(draws), placed, False


@compiled
def _copy(
    one: tuple[Ints, Ints, Floats, Floats, Ints], other: tuple[Ints, Ints, Floats, Floats, Ints]
) -> None:
    """Make `other` the same allocation."""
    other[HOMES][:] = one[HOMES]
    other[CUTS][:] = one[CUTS]
    other[WAITS][:] = one[WAITS]
    other[TURNS][:] = one[TURNS]
    other[WAYS][:] = one[WAYS]
