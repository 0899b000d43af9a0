"""Neighbourhood moves: small random changes of what a stage recomputes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from typing import Final

from pipeplan.ilp.recompute.contracted_chain import Segment

Runs = tuple[Segment, ...]
LONG: Final = (1, 1, 2, 3, 5, 8)
"""Layers of a run that is added, if there are so many."""


def mutate(
    random: Random, runs: Sequence[Segment], stage: Segment, offered: Sequence[Runs]
) -> Runs:
    """`runs` with others in the layers of `stage`.

    Args:
        random: what is drawn from.
        runs: of the whole chain, in order, none across the stage's borders.
        stage: first and last layer.
        offered: sets of runs of the stage that are each the cheapest of their bytes.
    """
    first, last = stage
    here = tuple(run for run in runs if first <= run[0] <= last)
    if offered and random.random() < 0.5:
        new = random.choice(offered)
    elif here and random.random() < 0.7:
        new = random.choice(_SMALLER if random.random() < 0.5 else _OTHER)(random, here, stage)
    else:
        new = _add(random, here, stage)
    before = (run for run in runs if run[0] < first)
    behind = (run for run in runs if run[0] > last)
    return (*before, *new, *behind)


def _add(random: Random, runs: Runs, stage: Segment) -> Runs:
    """One more run, which takes its layers from those it meets."""
    begin = random.randint(*stage)
    end = min(stage[1], begin + random.choice(LONG) - 1)
    return tuple(sorted([*_without(runs, (begin, end)), (begin, end)]))


def _without(runs: Runs, gone: Segment) -> Runs:
    """What is left of runs when some layers are kept."""
    left: list[Segment] = []
    for first, last in runs:
        ends = (first, min(last, gone[0] - 1)), (max(first, gone[1] + 1), last)
        left += [part for part in dict.fromkeys(ends) if part[0] <= part[1]]
    return tuple(left)


def _drop_one(random: Random, runs: Runs, stage: Segment) -> Runs:
    """One of the runs is kept."""
    gone = random.choice(runs)
    return tuple(run for run in runs if run != gone)


def _shorten(random: Random, runs: Runs, stage: Segment) -> Runs:
    """A layer at one of the ends of a run is kept."""
    first, last = random.choice(runs)
    end = random.choice((first, last))
    return _without(runs, (end, end))


def _lengthen(random: Random, runs: Runs, stage: Segment) -> Runs:
    """A run takes the layer beside it."""
    first, last = random.choice(runs)
    wide = random.choice(((first - 1, last), (first, last + 1)))
    wide = max(stage[0], wide[0]), min(stage[1], wide[1])
    return tuple(sorted([*_without(runs, wide), wide]))


def _split(random: Random, runs: Runs, stage: Segment) -> Runs:
    """A run becomes two that keep an input each."""
    first, last = random.choice(runs)
    if first == last:
        return runs
    cut = random.randint(first + 1, last)
    others = (run for run in runs if run != (first, last))
    return tuple(sorted([*others, (first, cut - 1), (cut, last)]))


def _join(random: Random, runs: Runs, stage: Segment) -> Runs:
    """Two runs, and what is kept between them, become one."""
    if len(runs) == 1:
        return runs
    one, other = random.choice(list(pairwise(runs)))
    others = (run for run in runs if run not in (one, other))
    return tuple(sorted([*others, (one[0], other[1])]))


_Step = Callable[[Random, Runs, Segment], Runs]
_SMALLER: tuple[_Step, ...] = (_drop_one, _shorten, _shorten)
_OTHER: tuple[_Step, ...] = (_lengthen, _lengthen, _split, _join)
