"""Random changes of an allocation in arrays, as machine code.

A step takes its random numbers from a row that it is given: the same rows give the same steps.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pipeplan.ilp.compiled import Floats, Ints, compiled
from pipeplan.ilp.local_search.allocation_stages import LayoutArrays, first_layers
from pipeplan.ilp.local_search.chain_arrays import BUDGETS, PINS, TIED, ChainArrays
from pipeplan.ilp.local_search.draws import pick
from pipeplan.ilp.local_search.run_moves import change_runs

CHANGE: Final = 6
"""Random numbers that a change takes."""
DRAWS: Final = 2 * CHANGE + 3
"""Those of a step: of two changes, of tied layers, whether there are two, whether it is taken."""
RUN_DRAWS: Final = DRAWS + 1
"""Those of a step that may change runs instead: before the last three, whether it does."""
CHANGING_RUNS: Final = 0.5
"""Share of these steps that change runs."""
TWICE: Final = 0.3
"""Share of the steps that make two changes."""
WAITING: Final = 0.3
"""Share of the changes that let a stage wait, or no longer."""
LONGEST_WAIT: Final = 0.5
"""In periods."""
SHIFT: Final = 0.15
"""By how much a copy's turn moves at most, in periods."""
BORDER_MOVES: Final = (1, 1, 1, 2, 3)
"""Layers by which a border moves."""
RUN_LENGTHS: Final = (1, 1, 2, 3, 5, 9)
"""Layers of a stage that move to another GPU."""


@compiled
def make_step(
    layout: LayoutArrays,
    chain: ChainArrays,
    options: Ints,
    draws: Floats,
) -> None:
    """One or two random changes; tied and pinned layers stay where they must."""
    homes, cuts, _, _, ways = layout
    if len(ways) > 0 and draws[-4] < CHANGING_RUNS:
        change_runs(ways, first_layers(homes, cuts), options, draws[:CHANGE])
        return
    gpus = len(chain[BUDGETS])
    _change(layout, gpus, draws[:CHANGE])
    if draws[-2] < TWICE:
        _change(layout, gpus, draws[CHANGE : 2 * CHANGE])
    keep(homes, chain, draws[-3])


@compiled
def keep(homes: Ints, chain: ChainArrays, draw: float) -> None:
    """Put tied layers where one of theirs is, pinned ones on their GPUs."""
    for group in chain[TIED]:
        gpu = homes[group[1 + pick(draw, group[0])]]
        for member in range(group[0]):
            homes[group[1 + member]] = gpu
    for layer in range(len(homes)):
        if chain[PINS][layer] >= 0:
            homes[layer] = chain[PINS][layer]


@compiled
def _change(layout: LayoutArrays, gpus: int, draws: Floats) -> None:
    """Move a border, a run of layers or a whole stage; swap two; split, join; shift; wait."""
    homes, cuts, waits, turns, _ = layout
    firsts, kind = first_layers(homes, cuts), draws[1]
    stages = len(firsts) - 1
    one, other = pick(draws[2], stages), pick(draws[3], stages)
    gpu = pick(draws[4], gpus)
    first, behind = firsts[one], firsts[one + 1]
    if draws[0] < WAITING:
        _change_waits(waits, firsts, draws[2:])
    elif len(turns) > 1 and kind < 0.1:
        _shift(turns, draws[2], draws[3])
    elif kind < 0.45 and stages > 1:
        _move_border(homes, firsts, draws[2:])
    elif kind < 0.72:
        begin = first + pick(draws[3], behind - first)
        length = RUN_LENGTHS[pick(draws[5], len(RUN_LENGTHS))]
        homes[begin : min(behind, begin + length)] = gpu
    elif kind < 0.82:
        homes[first:behind] = gpu
    elif kind < 0.9:
        here, there = homes[first], homes[firsts[other]]
        homes[first:behind] = there
        homes[firsts[other] : firsts[other + 1]] = here
    else:
        _resplit(homes, cuts, draws[2:])


@compiled
def _move_border(homes: Ints, firsts: Ints, draws: Floats) -> None:
    """Give some layers beside a border to the other side."""
    at = 1 + pick(draws[0], len(firsts) - 2)
    border, count = firsts[at], BORDER_MOVES[pick(draws[1], len(BORDER_MOVES))]
    if draws[2] < 0.5:
        homes[border : min(firsts[at + 1], border + count)] = homes[border - 1]
    else:
        homes[max(firsts[at - 1], border - count) : border] = homes[border]


@compiled
def _resplit(homes: Ints, cuts: Ints, draws: Floats) -> None:
    """Forget splits that do nothing, and one of the others, or add one."""
    real = 0
    for layer in range(1, len(homes)):
        if cuts[layer] and homes[layer] != homes[layer - 1]:
            cuts[layer] = 0
        real += cuts[layer]
    if real > 0 and draws[0] < 0.5:
        left = pick(draws[1], real)
        for layer in range(1, len(homes)):
            if cuts[layer]:
                if left == 0:
                    cuts[layer] = 0
                left -= 1
    elif len(homes) > 1:
        cuts[1 + pick(draws[1], len(homes) - 1)] = 1


@compiled
def _change_waits(waits: Floats, firsts: Ints, draws: Floats) -> None:
    """No wait for one of the stages that wait, or one for any stage, at its F or its B."""
    kept = np.zeros(waits.shape)
    waiting = np.empty(len(firsts), np.int64)
    count = 0
    for first in firsts[:-1]:
        if waits[first, 0] > 0 or waits[first, 1] > 0:
            kept[first] = waits[first]
            waiting[count] = first
            count += 1
    if count > 0 and draws[0] < 0.5:
        kept[waiting[pick(draws[1], count)]] = 0
    else:
        first = firsts[pick(draws[1], len(firsts) - 1)]
        kept[first] = 0
        kept[first, int(draws[2] < 0.5)] = LONGEST_WAIT * draws[3]
    waits[:] = kept


@compiled
def _shift(turns: Floats, which: float, way: float) -> None:
    """Move the turn of one copy; turns rise."""
    copy, last = 1 + pick(which, len(turns) - 1), len(turns) - 1
    moved = min(max(turns[copy] + SHIFT * (2 * way - 1), 0.0), 0.999)
    while copy > 1 and turns[copy - 1] > moved:
        turns[copy] = turns[copy - 1]
        copy -= 1
    while copy < last and turns[copy + 1] < moved:
        turns[copy] = turns[copy + 1]
        copy += 1
    turns[copy] = moved
