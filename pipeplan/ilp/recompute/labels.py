"""Labels of segments that begin at one layer: what a piece behind one makes, which are kept.

A label is a column of what `options` counts; the pieces it is made of are found by its parents.
All but `Labels` is compiled: a chain of 200 layers has twenty thousand segments, each of which
looks at thousands of labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pipeplan.ilp.compiled import Bools, Ints, compiled
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

FRONT: Final = 64
"""Labels that others are compared with before they are put into order."""

KEEPS, RUNS = -1, -2
"""Kinds of a last piece: a layer that keeps all, a run; others are the number of an option."""


Figures = tuple[int, int, int, int, int, int, int, int]
"""Of a layer: bytes of its input, saved of it, saved inside, saved of its output; beside what is
saved while its forward runs, while its backward does; ns that it takes more; 1 under an option."""
RunTables = tuple[Ints, Ints, Ints, Ints]
"""[l] -> ns of all forwards before layer l, bytes of its input; [kind, a, b] -> peak of the run
a..b behind a piece of that kind; [a, b] -> peak of its first forward."""
NestedTables = tuple[Ints, Ints, Ints, Ints, Ints]
"""[way, a, b] -> more ns, peak, label of the run a..b that holds others, -1 ns where it cannot;
[kind, a] -> bytes beside that peak behind a piece of that kind; [a, b] -> the least peak."""
Kinds = NDArray[np.int8]


@dataclass(frozen=True)
class Labels:
    """Everything found for segments that begin at one layer; label 0 is the empty segment."""

    rows: Array
    kind: Kinds
    """What the last piece is."""
    ends: list[tuple[int, int]]
    """By last layer: the first label and the one behind the last."""
    levels: Array
    """[m, label] -> what of its kept bytes can leave; no rows without offloading."""


@compiled
def kept_behind(
    rows: Ints,
    joined: Bools,
    figures: Figures,
    offset: int,
    layer: int,
    holding: bool,
    found: Ints,
) -> int:
    """Labels behind others when a layer keeps what it saves, or runs under an option.

    Args:
        rows: labels that end right before the layer.
        joined: which of them are of a kept layer, so that what lies between may leave with both.
        figures: the layer's.
        offset: number of the first label of `rows`.
        layer: its number.
        holding: whether to look at those in which runs hold others, or at all others.
        found: is filled.

    Returns:
        How many there are.
    """
    size, of_input, saved, of_output, ahead, behind, more, under = figures
    count = 0
    for old in range(rows.shape[1]):
        if (rows[HOLDS, old] > 0) != holding:
            continue
        kept, entry = rows[KEPT, old], max(rows[SAVED, old], of_input)
        found[MORE, count] = rows[MORE, old] + more
        found[KEPT, count] = kept + entry + saved
        found[AHEAD, count] = max(rows[AHEAD, old], kept + size + saved + ahead)
        peak = max(rows[PEAK, old], found[AHEAD, count])
        found[PEAK, count] = max(peak, found[KEPT, count] + of_output + behind)
        found[SAVED, count] = of_output
        found[STAYS, count] = rows[STAYS, old] + (0 if joined[old] else entry)
        found[UNDER, count] = rows[UNDER, old] + under
        found[HOLDS, count] = rows[HOLDS, old]
        found[PARENT, count] = offset + old
        found[BEGIN, count], found[INNER, count] = layer, 0
        count += 1
    return count


@compiled
def run_behind(
    rows: Ints,
    order: Ints,
    place: Ints,
    kind: Kinds,
    last: int,
    relaxed: bool,
    tables: RunTables,
    nested: NestedTables,
    holding: bool,
    found: Ints,
) -> int:
    """Labels behind others when all layers up to `last` are one run, in all ways it may be.

    Args:
        rows: labels.
        order: which of them a run may follow, and the order of what is found.
        place: the layer behind each.
        kind: what the last piece of each is.
        last: the layer.
        relaxed: whether a label may stand for another option, which saves less of its output, and
            the input of a run that begins the segment may leave.
        tables: of runs.
        nested: of runs that hold others.
        holding: whether to look at labels in which runs hold others, or at all others.
        found: is filled.

    Returns:
        How many there are.
    """
    before, source, peaks, light = tables
    longer, highest, label, entry, least = nested
    count = 0
    for way in range(-1, len(longer) if holding else 0):
        for old in order:
            if (way >= 0 or rows[HOLDS, old] > 0) != holding:
                continue
            first, kept = place[old], rows[KEPT, old]
            ahead = RUNS if relaxed and kind[old] >= 0 else kind[old]
            more, inner = before[last + 1] - before[first], 0
            peak = peaks[ahead, first, last]
            if way >= 0:
                if longer[way, first, last] < 0:
                    continue
                more, inner = more + longer[way, first, last], label[way, first, last]
                peak = max(highest[way, first, last] + entry[ahead, first], least[first, last])
            found[MORE, count] = rows[MORE, old] + more
            found[KEPT, count] = kept + source[first]
            found[PEAK, count] = max(rows[PEAK, old], kept + peak)
            found[AHEAD, count] = max(rows[AHEAD, old], kept + light[first, last])
            found[SAVED, count] = 0
            leaves = relaxed and old == 0
            found[STAYS, count] = rows[STAYS, old] + (0 if leaves else source[first])
            found[UNDER, count] = rows[UNDER, old]
            found[HOLDS, count] = rows[HOLDS, old] + (way >= 0)
            found[PARENT, count], found[BEGIN, count], found[INNER, count] = old, first, inner
            count += 1
    return count


@compiled
def keep(
    found: Ints,
    count: int,
    most: int,
    offload: bool,
    lowers: bool,
    in_order: bool,
    rows: Ints,
    chosen: Ints,
) -> int:
    """Copy the labels that are worth keeping, cheapest first.

    Args:
        found: [:, :count] labels.
        count: how many there are.
        most: how many are kept.
        offload: as `worth_keeping`.
        lowers: whether each that is kept has the least, in every field, of itself and of all
            between it and the next one: whatever is not kept is then represented.
        in_order: as `worth_keeping`.
        rows: are filled from the first column on.
        chosen: which each is, or stands for.

    Returns:
        How many there are.
    """
    good = worth_keeping(found, count, most, offload, in_order)
    for number, label in enumerate(good):
        rows[:, number], chosen[number] = found[:, label], label
    for label in range(count if lowers else 0):
        low, high = 0, len(good)
        while high - low > 1:
            middle = (low + high) // 2
            if _comes_before(found, label, good[middle]):
                high = middle
            else:
                low = middle
        for each in range(FIELDS):
            rows[each, low] = min(rows[each, low], found[each, label])
    return len(good)


@compiled
def worth_keeping(found: Ints, count: int, most: int, offload: bool, in_order: bool) -> Ints:
    """Labels that are the cheapest of their memory for some count, at most `most`, cheapest first.

    With `offload` also those that need little when two micro-batches are here and the others away.
    Labels that are `in_order` come cheapest first, those that cost the same by what is kept.
    """
    order = np.arange(count)
    if not in_order:
        order = _undominated(found, count, offload)
        order = order[np.argsort(found[MORE][order], kind="mergesort")]
    for end in range(1, len(order)):
        at = end
        while at > 0 and _comes_before(found, order[at], order[at - 1]):
            order[at], order[at - 1] = order[at - 1], order[at]
            at -= 1
    good, need = np.zeros(len(order), dtype=np.bool_), np.zeros(len(order), dtype=np.int64)
    for away in range(1 + offload):
        for copies in COUNTS:
            if away and copies <= 2:
                continue
            for number, label in enumerate(order):
                each = found[KEPT, label]
                need[number] = (copies - 1) * each + found[PEAK, label]
                if away:
                    need[number] -= (copies - 2) * (each - found[STAYS, label])
            _mark(need, min(EACH, most // 2), good)
    kept = np.flatnonzero(good)
    if len(kept) <= most:
        every: Ints = order[kept]
        return every
    share = (len(kept) - 1) / max(1, most - 1)
    evenly = np.rint(np.arange(most) * share).astype(np.int64)
    chosen: Ints = order[kept[evenly]]
    return chosen


@compiled
def sort_in(order: Ints, old: int, new: int, rows: Ints, place: Ints, tables: RunTables) -> None:
    """Merge labels into the order of what runs behind them cost, whatever layer these end with.

    Args:
        order: the first `old` labels are in order; `new` more are put among them.
        old: how many.
        new: how many.
        rows: all labels.
        place: the layer behind each.
        tables: of runs.
    """
    more = np.zeros(new, dtype=np.int64)
    for number in range(new):
        at = number
        while at > 0 and _runs_before(old + number, more[at - 1], rows, place, tables):
            more[at] = more[at - 1]
            at -= 1
        more[at] = old + number
    number, left = old - 1, new - 1
    for at in range(old + new - 1, -1, -1):
        if left < 0:
            break
        if number >= 0 and _runs_before(more[left], order[number], rows, place, tables):
            order[at] = order[number]
            number -= 1
        else:
            order[at] = more[left]
            left -= 1


@compiled
def _runs_before(one: int, other: int, rows: Ints, place: Ints, tables: RunTables) -> bool:
    """Whether a run behind one label costs less than behind another; ties as `_comes_before`."""
    before, source, _, _ = tables
    mine, its = place[one], place[other]
    more = rows[MORE, one] - before[mine] - rows[MORE, other] + before[its]
    kept = rows[KEPT, one] + source[mine] - rows[KEPT, other] - source[its]
    return bool(more < 0 or (more == 0 and (kept < 0 or (kept == 0 and one < other))))


@compiled
def _undominated(found: Ints, count: int, offload: bool) -> Ints:
    """Labels without nearly all those for which there is a cheaper one that never needs more.

    Compared with a few alone, those that dominated others last.
    """
    left, front = np.arange(count), np.zeros(FRONT, dtype=np.int64)
    used = size = 0
    for label in range(count - 1, -1, -1):
        dominated = False
        for number in range(used):
            other = front[number]
            if _dominates(found, other, label, offload):
                dominated = True
                front[number], front[number // 2] = front[number // 2], other
                break
        if not dominated:
            left[size] = label
            size += 1
            front[min(used, FRONT - 1)] = label
            used = min(used + 1, FRONT)
    return left[:size]


@compiled
def _dominates(found: Ints, one: int, other: int, offload: bool) -> bool:
    """Whether a label is cheaper than another one, and needs no more at any of `COUNTS`.

    What they need is linear in the count: the least and the largest decide.
    """
    if found[MORE, one] >= found[MORE, other] or found[PEAK, one] > found[PEAK, other]:
        return False
    kept, peak = found[KEPT, other] - found[KEPT, one], found[PEAK, other] - found[PEAK, one]
    stays = found[STAYS, other] - found[STAYS, one]
    most = COUNTS[-1]
    if (most - 1) * kept + peak < 0:
        return False
    return not (offload and min(stays, (most - 2) * stays) + kept + peak < 0)


@compiled
def _comes_before(found: Ints, one: int, other: int) -> bool:
    """Whether a label is cheaper than another one, or keeps less, or needs less, or is older."""
    for each in (MORE, KEPT, PEAK):
        if found[each, one] != found[each, other]:
            return bool(found[each, one] < found[each, other])
    return one < other


@compiled
def _mark(need: Ints, most: int, good: Bools) -> None:
    """Mark labels that need less than all cheaper ones: at most so many, evenly in bytes.

    Budgets fall anywhere between what the first and the last one need. So a gap in bytes costs
    most, and many steps close to each other are worth little: layers with several options each
    give hundreds.
    """
    steps = np.zeros(len(need), dtype=np.int64)
    size = 0
    for number in range(len(need)):
        if not size or need[number] < need[steps[size - 1]]:
            steps[size] = number
            size += 1
    if size <= most:
        for number in range(size):
            good[steps[number]] = True
        return
    start, stop = float(need[steps[0]]), float(need[steps[size - 1]])
    share = (stop - start) / max(1, most - 1)
    at = 0
    for number in range(most):
        level = stop if 0 < number == most - 1 else number * share + start
        while at < size - 1 and need[steps[at]] > level:
            at += 1
        good[steps[at]] = True
