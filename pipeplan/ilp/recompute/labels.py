"""Labels of segments that begin at one layer, and which of them are worth keeping.

A label is a column of what `options` counts; the pieces it is made of are found by its parents.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeplan.ilp.segment_tables import Array

MOST = 48
"""Options of a segment that end with a run, with a kept layer, with a layer's option, each."""
EACH = 12
"""How many of them are kept for one number of micro-batches in flight."""
NESTED = (4, 12)
"""As many more of each in which runs hold others: they leave the rest as it is. For bounds the
second number: fewer would weaken them."""
COUNTS = (1, 2, 3, 4, 6, 9, 14)
"""Micro-batches in flight for which options are compared."""

FIELDS = 11
MORE, KEPT, PEAK, AHEAD, SAVED, STAYS, UNDER, HOLDS, PARENT, BEGIN, INNER = range(FIELDS)
"""Rows of a label: more ns, P, peak, that of the forward alone, s, R, how many layers run under an
option, how many runs hold others, the label before, the first layer of the last piece, the label
of what is inside it."""

KEEPS, RUNS = -1, -2
"""Kinds of a last piece: a layer that keeps all, a run; others are the number of an option."""


Chosen = tuple[Array, NDArray[np.intp]]
"""Labels, and which of those that were given they are, or stand for."""


@dataclass(frozen=True)
class Labels:
    """Everything found for segments that begin at one layer; label 0 is the empty segment."""

    rows: Array
    kind: NDArray[np.int8]
    """What the last piece is."""
    ends: list[tuple[int, int]]
    """By last layer: the first label and the one behind the last."""
    levels: Array
    """[m, label] -> what of its kept bytes can leave; no rows without offloading."""


def apart(
    group: Sequence[tuple[int, Array]], nested: int
) -> Iterator[tuple[NDArray[np.int8], Array, int]]:
    """Kinds and labels of which no run holds another, then the others; how many of each are kept.

    Args:
        group: kinds, and labels of each.
        nested: how many are kept of those of which a run holds another.
    """
    kinds = np.concatenate([np.full(made.shape[1], of, dtype=np.int8) for of, made in group])
    labels = np.concatenate([made for _, made in group], axis=1)
    for holding, most in ((False, MOST), (True, nested)):
        here = (labels[HOLDS] > 0) == holding
        if here.any():
            yield kinds[here], labels[:, here], most


def best(labels: Array, most: int, offload: bool) -> Chosen:
    """Those that are the cheapest of their memory for some count, at most `most` of them."""
    order = ordered(labels)
    order = order[worth_keeping(labels[:, order], most, offload)]
    return labels[:, order], order


def lowered(labels: Array, most: int, offload: bool) -> Chosen:
    """As many as `best` keeps, each with the least of all up to the next one in every field."""
    order = ordered(labels)
    good = worth_keeping(labels[:, order], most, offload)
    low: Array = np.minimum.reduceat(labels[:, order], good, axis=1)
    return low, order[good]


def ordered(labels: Array) -> NDArray[np.intp]:
    """Cheapest first."""
    return np.lexsort((labels[PEAK], labels[KEPT], labels[MORE]))


def worth_keeping(labels: Array, most: int, offload: bool) -> NDArray[np.intp]:
    """Which of the ordered labels are worth keeping, at most `most`; the first one always is.

    With `offload` also those that need little when two micro-batches are here and the others away.
    """
    good = np.zeros(labels.shape[1], dtype=bool)
    needs = [(count - 1) * labels[KEPT] + labels[PEAK] for count in COUNTS]
    if offload:
        needs += [
            need - (count - 2) * (labels[KEPT] - labels[STAYS])
            for count, need in zip(COUNTS, needs, strict=True)
            if count > 2
        ]
    for need in needs:
        least = np.minimum.accumulate(need)
        steps = np.flatnonzero(need < np.concatenate([[np.iinfo(np.int64).max], least[:-1]]))
        good[_spread(steps, need, min(EACH, most // 2))] = True
    kept = np.flatnonzero(good)
    if len(kept) > most:
        kept = kept[np.linspace(0, len(kept) - 1, most).round().astype(np.int64)]
    return kept


def _spread(steps: NDArray[np.intp], need: Array, most: int) -> NDArray[np.intp]:
    """At most so many of `steps`, which need less and less, evenly in bytes, not in number.

    Budgets fall anywhere between what the first and the last one need. So a gap in bytes costs
    most, and many steps close to each other are worth little: layers with several options each
    give hundreds.
    """
    if len(steps) <= most:
        return steps
    levels = np.linspace(need[steps[0]], need[steps[-1]], most)
    chosen = np.searchsorted(-need[steps], -levels)
    return steps[np.minimum(chosen, len(steps) - 1)]
