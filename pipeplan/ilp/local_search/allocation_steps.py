"""Annealing over allocations as machine code: step by step, from hot to cold."""

from __future__ import annotations

from math import exp

from pipeplan.ilp.compiled import Floats, Records, compiled
from pipeplan.ilp.local_search.allocation_judge import judge
from pipeplan.ilp.local_search.allocation_moves import make_step
from pipeplan.ilp.local_search.allocation_stages import LayoutArrays
from pipeplan.ilp.local_search.chain_arrays import ChainArrays
from pipeplan.ilp.local_search.layer_ways import ENDS, OPTIONS, WayArrays

HOMES, CUTS, WAITS, TURNS, WAYS = range(5)
"""What an allocation is."""


@compiled
def walk(
    chain: ChainArrays,
    by_way: WayArrays,
    host: Floats,
    stages: Records,
    at: LayoutArrays,
    new: LayoutArrays,
    closest: LayoutArrays,
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
def _copy(one: LayoutArrays, other: LayoutArrays) -> None:
    """Make `other` the same allocation."""
    other[HOMES][:] = one[HOMES]
    other[CUTS][:] = one[CUTS]
    other[WAITS][:] = one[WAITS]
    other[TURNS][:] = one[TURNS]
    other[WAYS][:] = one[WAYS]
