"""Neighbourhood moves: small random changes of what a stage recomputes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from random import Random

from pipeplan.chain import Chain
from pipeplan.ilp.local_search.run_moves import LONG
from pipeplan.ilp.runs import Run, Runs, Segment


def mutate(
    random: Random,
    runs: Sequence[Run],
    stage: Segment,
    offered: Sequence[Runs],
    options: Sequence[Run] = (),
) -> Runs:
    """`runs` with others in the layers of `stage`.

    Args:
        random: what is drawn from.
        runs: of the whole chain, in order, none across the stage's borders.
        stage: first and last layer.
        offered: sets of runs of the stage that are each the cheapest of their bytes.
        options: of the stage's layers.
    """
    first, last = stage
    here = tuple(run for run in runs if first <= run.first <= last)
    if offered and random.random() < 0.5:
        new = random.choice(offered)
    elif here and random.random() < 0.7:
        new = random.choice(_SMALLER if random.random() < 0.5 else _OTHER)(random, here, stage)
    else:
        new = _add(random, here, stage, options)
    before = (run for run in runs if run.first < first)
    behind = (run for run in runs if run.first > last)
    return (*before, *new, *behind)


def _add(random: Random, runs: Runs, stage: Segment, options: Sequence[Run]) -> Runs:
    """One more run, which takes its layers from those it meets."""
    if options and random.random() < 0.5:
        new = random.choice(options)
    else:
        begin = random.randint(*stage)
        new = Run(begin, min(stage[1], begin + random.choice(LONG) - 1))
    return tuple(sorted([*_without(runs, new.segment), new]))


def _without(runs: Runs, gone: Segment) -> Runs:
    """What is left of runs when some layers are kept."""
    left: list[Run] = []
    for run in runs:
        ends = (run.first, min(run.last, gone[0] - 1)), (max(run.first, gone[1] + 1), run.last)
        left += [run.clip(*part) for part in dict.fromkeys(ends) if part[0] <= part[1]]
    return tuple(left)


def _drop_one(random: Random, runs: Runs, stage: Segment) -> Runs:
    """One of the runs is kept."""
    gone = random.choice(runs)
    return tuple(run for run in runs if run != gone)


def _shorten(random: Random, runs: Runs, stage: Segment) -> Runs:
    """A layer at one of the ends of a run is kept."""
    end = random.choice(random.choice(runs).segment)
    return _without(runs, (end, end))


def _lengthen(random: Random, runs: Runs, stage: Segment) -> Runs:
    """A run takes the layer beside it."""
    old = random.choice(runs)
    wide = random.choice(((old.first - 1, old.last), (old.first, old.last + 1)))
    run = Run(max(stage[0], wide[0]), min(stage[1], wide[1]), inner=old.inner)
    return tuple(sorted([*_without(runs, run.segment), run]))


def _split(random: Random, runs: Runs, stage: Segment) -> Runs:
    """A run becomes two that keep an input each."""
    whole = random.choice(runs)
    first, last = whole.segment
    if first == last:
        return runs
    cut = random.randint(first + 1, last)
    others = (run for run in runs if run.first != first)
    return tuple(sorted([*others, whole.clip(first, cut - 1), whole.clip(cut, last)]))


def _join(random: Random, runs: Runs, stage: Segment) -> Runs:
    """Two runs, and what is kept between them, become one."""
    if len(runs) == 1:
        return runs
    one, other = random.choice(list(pairwise(runs)))
    others = (run for run in runs if run not in (one, other))
    return tuple(sorted([*others, Run(one.first, other.last)]))


_Step = Callable[[Random, Runs, Segment], Runs]
_SMALLER: tuple[_Step, ...] = (_drop_one, _shorten, _shorten)
_OTHER: tuple[_Step, ...] = (_lengthen, _lengthen, _split, _join)


def ways(chain: Chain) -> Iterator[Runs]:
    """What each layer may do but keep all: nothing kept, its first option, its second, ..

    A layer without so many options keeps all.
    """
    layers = chain.layers
    yield tuple(Run(layer, layer) for layer in range(len(layers)))
    for number in range(max(len(layer.options) for layer in layers)):
        having = (n for n, layer in enumerate(layers) if number < len(layer.options))
        yield tuple(Run(layer, layer, number) for layer in having)


def options_of(chain: Chain, stage: Segment) -> list[Run]:
    """The options of a segment's layers."""
    return [
        Run(layer, layer, number)
        for layer in range(stage[0], stage[1] + 1)
        for number in range(len(chain.layers[layer].options))
    ]
