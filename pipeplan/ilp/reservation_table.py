"""The modulo reservation table (Rau 1994), as machine code: busy arcs on a circle of one period.

Arcs are disjoint. An arc without length still keeps others from lying across it, as (R3) and (R4)
ask. A table is an array of two rows: its first column has the number of arcs and the period, then
come the arcs' starts, which rise and are less than the period, and their ends, which lie beyond it
where an arc wraps.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pipeplan.ilp.compiled import Ints, compiled

NOWHERE: Final = -(2**63)
"""In place of a start: nothing is free."""


@compiled
def clear(table: Ints, period: int) -> None:
    """Make an array a table without arcs."""
    table[0, 0], table[1, 0] = 0, period


@compiled
def add(table: Ints, start: int, length: int) -> None:
    """Occupy [start, start + length) modulo the period; it must be free."""
    offset = start % table[1, 0]
    at = table[0, 0] + 1
    # An arc without length comes before one that starts with it.
    while at > 1 and (table[0, at - 1] > offset or (length == 0 and table[0, at - 1] == offset)):
        table[0, at], table[1, at] = table[0, at - 1], table[1, at - 1]
        at -= 1
    table[0, at], table[1, at] = offset, offset + length
    table[0, 0] += 1


@compiled
def remove(table: Ints, start: int, length: int) -> None:
    """Undo `add`."""
    offset = start % table[1, 0]
    at = 1
    while table[0, at] != offset or table[1, at] != offset + length:
        at += 1
    for later in range(at, table[0, 0]):
        table[0, later], table[1, later] = table[0, later + 1], table[1, later + 1]
    table[0, 0] -= 1


@compiled
def earliest_fit(table: Ints, time: int, length: int) -> int:
    """The earliest start >= `time` at which `length` is free, or NOWHERE."""
    count, period = table[0, 0], table[1, 0]
    if count == 0:
        return time if length <= period else NOWHERE
    offset = time % period
    index = count
    while index > 0 and table[0, index] > offset:
        index -= 1
    before = table[1, index] if index > 0 else table[1, count] - period
    at = max(offset, before)
    for other in range(index, index + 1 + count):
        arc, wrap = other % count + 1, other // count * period
        if at + length <= table[0, arc] + wrap:
            return int(time - offset + at)
        at = max(at, table[1, arc] + wrap)
    return NOWHERE


@compiled
def latest_fit(table: Ints, time: int, length: int) -> int:
    """The latest start at which `length` is free and ends by `time`, or NOWHERE."""
    count, period = table[0, 0], table[1, 0]
    if count == 0:
        return time - length if length <= period else NOWHERE
    offset = time % period
    index = 0
    while index < count and table[0, index + 1] < offset:
        index += 1
    at = offset
    for other in range(index - 1, index - 2 - count, -1):
        arc, wrap = other % count + 1, other // count * period
        if table[1, arc] + wrap <= at - length:
            return int(time - offset + at - length)
        at = min(at, table[0, arc] + wrap)
    return NOWHERE


@compiled
def free_intervals(table: Ints) -> Ints:
    """All free arcs of some length: (start, length) in rows; starts are less than the period."""
    count, period = table[0, 0], table[1, 0]
    free = np.empty((count + 1, 2), np.int64)
    if count == 0:
        free[0, 0], free[0, 1] = 0, period
        return free
    found = 0
    for arc in range(1, count + 1):
        following = table[0, arc + 1] if arc < count else table[0, 1] + period
        if following > table[1, arc]:
            free[found, 0], free[found, 1] = table[1, arc] % period, following - table[1, arc]
            found += 1
    return free[:found]
