"""Random changes of what a stage computes again, of layers' ways in an array: machine code.

A run takes a layer more or less, is split, joined to the next one or dropped; one is added; a
layer takes an option; all layers of the stage run alike. Source: ours.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pipeplan.ilp.compiled import Floats, Ints, compiled
from pipeplan.ilp.local_search.draws import pick
from pipeplan.ilp.local_search.layer_ways import INSIDE, KEPT, OPTION, RUN, piece_end

LONG: Final = (1, 1, 2, 3, 5, 8)
"""Layers of a run that is added, if there are so many."""
ALIKE: Final = 0.2
"""Share of the changes that let all layers of a stage run alike."""
OLD: Final = 0.7
"""Share of the others that change a run, where there is one."""
FEWER: Final = 0.5
"""Share of those after which fewer layers run again."""


@compiled
def change_runs(ways: Ints, firsts: Ints, options: Ints, draws: Floats) -> None:
    """Change the ways of one stage's layers.

    Args:
        ways: how each layer runs, as `layer_ways` numbers it; changed.
        firsts: first layers of the stages, and the number of layers.
        options: how many each layer has.
        draws: six random numbers from 0 to 1.
    """
    stage = pick(draws[0], len(firsts) - 1)
    first, behind = firsts[stage], firsts[stage + 1]
    starts = _starts(ways, first, behind)
    if draws[1] < ALIKE:
        _run_alike(ways, first, behind, options, draws[2])
    elif len(starts) > 0 and draws[2] < OLD:
        at = pick(draws[3], len(starts))
        if draws[1] < ALIKE + FEWER * (1 - ALIKE):
            _take_less(ways, starts[at], behind, draws[4])
        elif draws[4] < 0.5:
            _lengthen(ways, starts[at], first, behind, draws[5])
        elif draws[4] < 0.75:
            _split(ways, starts[at], behind, draws[5])
        elif len(starts) > 1:
            at = pick(draws[3], len(starts) - 1)
            fill(ways, starts[at], piece_end(ways, starts[at + 1], behind), RUN)
    else:
        begin = first + pick(draws[3], behind - first)
        if options[begin] > 0 and draws[4] < 0.5:
            fill(ways, begin, begin + 1, OPTION + pick(draws[5], options[begin]))
        else:
            fill(ways, begin, min(behind, begin + LONG[pick(draws[5], len(LONG))]), RUN)


@compiled
def fill(ways: Ints, begin: int, behind: int, way: int) -> None:
    """Let layers run in one way; with `RUN` they are one. Runs that they meet lose them."""
    if behind < len(ways) and ways[behind] == INSIDE:
        ways[behind] = RUN
    ways[begin:behind] = way
    if way == RUN:
        ways[begin + 1 : behind] = INSIDE


@compiled
def _starts(ways: Ints, first: int, behind: int) -> Ints:
    """Where pieces of a stage begin that do not keep all."""
    found, count, layer = np.empty(behind - first, np.int64), 0, first
    while layer < behind:
        if ways[layer] != KEPT:
            found[count] = layer
            count += 1
        layer = piece_end(ways, layer, behind)
    return found[:count]


@compiled
def _run_alike(ways: Ints, first: int, behind: int, options: Ints, draw: float) -> None:
    """All is kept, or is one run, or each layer is one; or each takes an option if it has it."""
    most = 0
    for layer in range(first, behind):
        most = max(most, options[layer])
    kind = pick(draw, 3 + most)
    if kind < 2:
        fill(ways, first, behind, KEPT if kind == 0 else RUN)
        return
    for layer in range(first, behind):
        if kind == 2:
            fill(ways, layer, layer + 1, RUN)
        else:
            has = kind - 3 < options[layer]
            fill(ways, layer, layer + 1, OPTION + kind - 3 if has else KEPT)


@compiled
def _take_less(ways: Ints, start: int, behind: int, draw: float) -> None:
    """Keep a whole run, or its first or its last layer."""
    end = piece_end(ways, start, behind)
    if draw < 1 / 3:
        fill(ways, start, end, KEPT)
    elif draw < 2 / 3:
        fill(ways, start, start + 1, KEPT)
    else:
        fill(ways, end - 1, end, KEPT)


@compiled
def _lengthen(ways: Ints, start: int, first: int, behind: int, draw: float) -> None:
    """A run takes the layer before or behind it."""
    end = piece_end(ways, start, behind)
    if draw < 0.5:
        fill(ways, max(first, start - 1), end, RUN)
    else:
        fill(ways, start, min(behind, end + 1), RUN)


@compiled
def _split(ways: Ints, start: int, behind: int, draw: float) -> None:
    """A run becomes two that keep an input each."""
    length = piece_end(ways, start, behind) - start
    if length > 1:
        ways[start + 1 + pick(draw, length - 1)] = RUN
