"""Places for pairs of ops that leave room for all others of a reservation table: machine code.

Nearest free places split free time into pieces. On a GPU with several stages and little idle time
the last ops then fit nowhere although the pieces suffice in sum. There a pair of ops takes the
nearest places, inside free intervals or at either end of one, that leave intervals for all the
rest (best-fit decreasing bin packing, Johnson 1973). Such places exist as long as the intervals
before sufficed, since places at an end split nothing off. Source: ours.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final

import numpy as np

from pipeplan.ilp.compiled import Ints, compiled
from pipeplan.ilp.reservation_table import NOWHERE

MOST_PAIRS: Final = 400
"""Pairs of places that look-ahead tries, nearest first."""


@compiled
def insert(values: Ints, value: int) -> None:
    """Put one more among values that rise, whose number comes before them."""
    at = values[0] + 1
    while at > 1 and values[at - 1] > value:
        values[at] = values[at - 1]
        at -= 1
    values[at] = value
    values[0] += 1


@compiled
def fits_rest(free: Ints, rest: Ints) -> bool:
    """Whether ops fit into free intervals, the longest first, each into the tightest one.

    Args:
        free: intervals.
        rest: how many ops, then their lengths, rising.
    """
    missing = 0
    for op in range(1, rest[0] + 1):
        missing += rest[op]
    room = np.zeros(len(free) + 1, np.int64)
    for interval in free:
        if interval[1] >= missing:
            return True
        insert(room, interval[1])
    for op in range(rest[0], 0, -1):
        at = 1
        while at <= room[0] and room[at] < rest[op]:
            at += 1
        if at > room[0]:
            return False
        left = room[at] - rest[op]
        while at > 1 and room[at - 1] > left:
            room[at] = room[at - 1]
            at -= 1
        room[at] = left
    return True


@compiled
def place_pair(
    free: Ints, period: int, long_in: int, long_out: int, end: int, begin: int, rest: Ints
) -> tuple[int, int]:
    """Starts of an op that ends by `end` and of one that begins from `begin` on.

    Args:
        free: intervals of the table that both use.
        period: of the table.
        long_in: ns of the op that ends.
        long_out: ns of the op that begins.
        end: by when.
        begin: from when on.
        rest: how many ops come later and must still find room, then their lengths, rising.

    Returns:
        The two starts with the least waiting, or NOWHERE twice.
    """
    latest = end - long_in
    ins = _waits(free, period, long_in, latest, -1)
    outs = _waits(free, period, long_out, begin, 1)
    if ins[0] == 0 or outs[0] == 0:
        return NOWHERE, NOWHERE
    left = np.empty((len(free) + 2, 2), np.int64)
    queue = [(ins[1] + outs[1], 1, 1)]
    for _ in range(MOST_PAIRS):
        if len(queue) == 0:
            break
        _, one, other = heappop(queue)
        start, later = latest - ins[one], begin + outs[other]
        count = _carve(free, len(free), later, long_out, period, left)
        if count >= 0:
            count = _carve(left, count, start, long_in, period, left)
        if count >= 0 and fits_rest(left[:count], rest):
            return start, later
        if other == 1 and one < ins[0]:
            heappush(queue, (ins[one + 1] + outs[1], one + 1, 1))
        if other < outs[0]:
            heappush(queue, (ins[one] + outs[other + 1], one, other + 1))
    return NOWHERE, NOWHERE


@compiled
def _waits(free: Ints, period: int, length: int, time: int, way: int) -> Ints:
    """How far from `time` an op may start, onward (way 1) or backward (-1): how many, rising.

    At once, if that lies in a free interval, and at both ends of each.
    """
    waits = np.zeros(3 * len(free) + 1, np.int64)
    for interval in free:
        begin, size = interval[0], interval[1]
        if size < length:
            continue
        if (time - begin) % period + length <= size:
            _insert_new(waits, 0)
        _insert_new(waits, way * (begin - time) % period)
        _insert_new(waits, way * (begin + size - length - time) % period)
    return waits


@compiled
def _insert_new(values: Ints, value: int) -> None:
    """As `insert`, if there is none like it."""
    for at in range(1, values[0] + 1):
        if values[at] == value:
            return
    insert(values, value)


@compiled
def _carve(free: Ints, count: int, start: int, length: int, period: int, left: Ints) -> int:
    """Take an op out of the first of so many intervals in which it lies.

    `left`, which may be `free`, gets what is left, in two rows where an interval is split.

    Returns:
        How many intervals are left; -1 where the op lies in none.
    """
    found = 0
    while found < count and (start - free[found, 0]) % period + length > free[found, 1]:
        found += 1
    if found == count:
        return -1
    begin, size = free[found, 0], free[found, 1]
    before = (start - begin) % period
    behind = size - before - length
    more = int(before > 0) + int(behind > 0) - 1
    if more >= 0:
        for at in range(count - 1, found, -1):
            left[at + more, 0], left[at + more, 1] = free[at, 0], free[at, 1]
    else:
        for at in range(found + 1, count):
            left[at - 1, 0], left[at - 1, 1] = free[at, 0], free[at, 1]
    for at in range(found):
        left[at, 0], left[at, 1] = free[at, 0], free[at, 1]
    if before > 0:
        left[found, 0], left[found, 1] = begin, before
    if behind > 0:
        at = found + int(before > 0)
        left[at, 0], left[at, 1] = (begin + before + length) % period, behind
    return count + more
