"""Modulo list scheduling as machine code: reservation tables, nearest free places, look-ahead.

The modulo reservation table is Rau's (1994): disjoint busy arcs on a circle of one period. An arc
without length still keeps others from lying across it, as (R3) and (R4) ask. A table is an array
of two rows: its first column has the number of arcs and the period, then come the arcs' starts,
which rise and are less than the period, and their ends, which lie beyond it where an arc wraps.

Nearest free places split free time into pieces. On a GPU with several stages and little idle time
the last ops then fit nowhere although the pieces suffice in sum. There a pair of ops takes the
nearest places, inside free intervals or at either end of one, that leave intervals for all the
rest (best-fit decreasing bin packing, Johnson 1973). Such places exist as long as the intervals
before sufficed, since places at an end split nothing off. Source: ours.

All of it is one file because what numba keeps of a function includes the functions that it calls,
and is made anew only where the file of the function itself has changed.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Final

import numpy as np

from pipeplan.ilp.compiled import Bools, Ints, Records, compiled

NOWHERE: Final = -(2**63)
"""In place of a start: nothing is free."""
MOST_PAIRS: Final = 400
"""Pairs of places that look-ahead tries, nearest first."""

F, B, SEND_F, SEND_B = range(4)
"""Ops, as the times of `place` are numbered; SEND_B is of the stage that sends."""

_TIMES: Final = ("gpu", "forward", "backward", "out", "send_forward", "back", "send_backward")
_BYTES: Final = ("fixed", "kept_after", "saved", "running", "returning")
_MESSAGES: Final = ("sent", "received", "gradient_sent", "gradient_received")
STAGE: Final = np.dtype(
    [(name, np.int64) for name in (*_TIMES, "in_wait", "out_wait", *_BYTES, *_MESSAGES)]
)
"""Of every stage: its GPU and what F and B take in ns; tables of the links over which its output
goes to the next stage (-1: none) and that one's gradient comes back, and what that takes; ns
between the end of its F and what needs it, and between what its B needs and its B. Then bytes that
are always there, that a micro-batch keeps from so many ns after its F begins to the end of B, and
that F and B need beside it while they run; of the output and of its gradient, those that lie with
the sender until they have left, and with the receiver until they are used."""


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
        table[:, at] = table[:, at - 1]
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
        table[:, later] = table[:, later + 1]
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
        arc, turn = other % count + 1, other // count * period
        if at + length <= table[0, arc] + turn:
            return time - offset + at
        at = max(at, table[1, arc] + turn)
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
        arc, turn = other % count + 1, other // count * period
        if table[1, arc] + turn <= at - length:
            return time - offset + at - length
        at = min(at, table[0, arc] + turn)
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


@compiled
def fits_rest(free: Ints, rest: Ints) -> bool:
    """Whether ops of these lengths, which rise, fit into free intervals.

    The longest op first, each into the tightest interval.
    """
    if rest.size == 0:
        return True
    room = np.sort(free[:, 1])
    if room.size > 0 and room[-1] >= rest.sum():
        return True
    for length in rest[::-1]:
        at = np.searchsorted(room, length)
        if at == room.size:
            return False
        left = room[at] - length
        while at > 0 and room[at - 1] > left:
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
        rest: lengths of ops that come later and must still find room, rising.

    Returns:
        The two starts with the least waiting, or NOWHERE twice.
    """
    latest = end - long_in
    ins = _waits(free, period, long_in, latest, -1)
    outs = _waits(free, period, long_out, begin, 1)
    if ins.size == 0 or outs.size == 0:
        return NOWHERE, NOWHERE
    queue = [(ins[0] + outs[0], 0, 0)]
    for _ in range(MOST_PAIRS):
        if len(queue) == 0:
            break
        _, one, other = heappop(queue)
        starts = latest - ins[one], begin + outs[other]
        fits, left = _without(free, starts[1], long_out, period)
        if fits:
            fits, left = _without(left, starts[0], long_in, period)
        if fits and fits_rest(left, rest):
            return starts
        if other == 0 and one + 1 < ins.size:
            heappush(queue, (ins[one + 1] + outs[0], one + 1, 0))
        if other + 1 < outs.size:
            heappush(queue, (ins[one] + outs[other + 1], one, other + 1))
    return NOWHERE, NOWHERE


@compiled
def _waits(free: Ints, period: int, length: int, time: int, way: int) -> Ints:
    """How far from `time` an op may start, onward (way 1) or backward (-1), rising.

    At once, if that lies in a free interval, and at both ends of each.
    """
    waits = np.empty(3 * len(free), np.int64)
    found = 0
    for begin, size in free:
        if size < length:
            continue
        if (time - begin) % period + length <= size:
            waits[found] = 0
            found += 1
        waits[found] = way * (begin - time) % period
        waits[found + 1] = way * (begin + size - length - time) % period
        found += 2
    return np.unique(waits[:found])


@compiled
def _without(free: Ints, start: int, length: int, period: int) -> tuple[bool, Ints]:
    """Whether an op lies in one of the intervals, and what it leaves of them."""
    for at in range(len(free)):
        begin, size = free[at]
        offset = (start - begin) % period
        if offset + length > size:
            continue
        left = np.empty((len(free) + 1, 2), np.int64)
        left[:at] = free[:at]
        found = at
        if offset > 0:
            left[found, 0], left[found, 1] = begin, offset
            found += 1
        if size - offset - length > 0:
            left[found, 0] = (begin + offset + length) % period
            left[found, 1] = size - offset - length
            found += 1
        behind = len(free) - at - 1
        left[found : found + behind] = free[at + 1 :]
        return True, left[: found + behind]
    return False, free


@compiled
def place(stages: Records, tables: int, period: int, centres: Ints, times: Ints) -> int:
    """Place every B as early and every F as late as the later stages and the tables allow.

    Args:
        stages: as `STAGE` says.
        tables: how many there are; the first ones are of GPUs.
        period: in ns, of all copies.
        centres: around which instants the copies' turns from F to B lie, rising.
        times: starts by op, stage and copy, as F to SEND_B number the ops; filled in.

    Returns:
        How many stages found room, from the last one on.
    """
    count, copies = len(stages), centres.size
    most = 1 + 2 * copies * count
    busy, lengths = np.empty((tables, 2, most), np.int64), np.zeros((tables, most), np.int64)
    for stage in stages:
        clear(busy[stage.gpu], period)
        if stage.out >= 0:
            clear(busy[stage.out], period)
            clear(busy[stage.back], period)
    for stage in stages:
        for _ in range(copies):
            _put(lengths[stage.gpu], stage.forward)
            _put(lengths[stage.gpu], stage.backward)
    opening, closing = centres.copy(), centres.copy()
    for number in range(count - 1, -1, -1):
        stage = stages[number]
        if stage.out >= 0:
            ways = busy[stage.out], busy[stage.back], stage.out == stage.back
            ns = stage.send_forward, stage.send_backward
            if not _pairs(ways, ns, opening, closing, lengths[stage.out]):
                return count - 1 - number
            times[SEND_F, number], times[SEND_B, number + 1] = opening, closing
            closing += stage.send_backward
        opening -= stage.in_wait
        closing += stage.out_wait
        own = busy[stage.gpu], busy[stage.gpu], True
        ns = stage.forward, stage.backward
        if not _pairs(own, ns, opening, closing, lengths[stage.gpu]):
            return count - 1 - number
        times[F, number], times[B, number] = opening, closing
        closing += stage.backward
    return count


@compiled
def _pairs(
    tables: tuple[Ints, Ints, bool],
    lengths: tuple[int, int],
    opening: Ints,
    closing: Ints,
    rest: Ints,
) -> bool:
    """Place an op on the way in and its counterpart on the way out, for all copies.

    Copies are alike, so their starts are handed out in order: FIFO (R5).

    Args:
        tables: of the way in and of the way out, and whether they are one.
        lengths: of the two ops, in ns.
        opening: by copy, when the first op must end; then, when it starts.
        closing: by copy, from when on the other one may begin; then, when it starts.
        rest: how many ops of the table must find room, and their lengths, rising; the copies' are
            taken out. On links there are none.

    Returns:
        Whether there is room.
    """
    table_in, table_out, same = tables
    long_in, long_out = lengths
    for copy in range(opening.size):
        end, begin = opening[copy], closing[copy]
        if rest[0] > 0:
            _take(rest, long_in)
            _take(rest, long_out)
        left = rest[1 : 1 + rest[0]]
        starts = _nearest_pair(table_in, table_out, long_in, long_out, end, begin)
        if starts[0] != NOWHERE and left.size > 0:
            if not fits_rest(free_intervals(table_in), left):
                remove(table_in, starts[0], long_in)
                remove(table_in, starts[1], long_out)
                starts = NOWHERE, NOWHERE
        if starts[0] == NOWHERE and same:
            free = free_intervals(table_in)
            starts = place_pair(free, table_in[1, 0], long_in, long_out, end, begin, left)
            if starts[0] != NOWHERE:
                add(table_in, starts[0], long_in)
                add(table_in, starts[1], long_out)
        if starts[0] == NOWHERE:
            return False
        opening[copy], closing[copy] = starts
    opening.sort()
    closing.sort()
    return True


@compiled
def _nearest_pair(
    table_in: Ints, table_out: Ints, long_in: int, long_out: int, end: int, begin: int
) -> tuple[int, int]:
    """Start one op as late as it can end by `end`, another as early as from `begin` on.

    Where both want the same place, the one yields that lengthens the whole stay the least.
    """
    early = earliest_fit(table_out, begin, long_out)
    late = latest_fit(table_in, end, long_in)
    if early == NOWHERE or late == NOWHERE:
        return NOWHERE, NOWHERE
    add(table_out, early, long_out)
    yielding = latest_fit(table_in, end, long_in)
    if yielding == late:
        add(table_in, late, long_in)
        return late, early
    remove(table_out, early, long_out)
    add(table_in, late, long_in)
    waiting = earliest_fit(table_out, begin, long_out)
    if waiting != NOWHERE and (yielding == NOWHERE or waiting - early <= late - yielding):
        add(table_out, waiting, long_out)
        return late, waiting
    remove(table_in, late, long_in)
    if yielding == NOWHERE:
        return NOWHERE, NOWHERE
    add(table_in, yielding, long_in)
    add(table_out, early, long_out)
    return yielding, early


@compiled
def _put(lengths: Ints, length: int) -> None:
    """One more of the lengths, which rise and whose number comes first."""
    lengths[0] += 1
    at = lengths[0]
    while at > 1 and lengths[at - 1] > length:
        lengths[at] = lengths[at - 1]
        at -= 1
    lengths[at] = length


@compiled
def _take(lengths: Ints, length: int) -> None:
    """One less."""
    at = 1
    while lengths[at] != length:
        at += 1
    lengths[at : lengths[0]] = lengths[at + 1 : lengths[0] + 1]
    lengths[0] -= 1


@compiled
def place_in_turn(
    period: int, in_turn: Ints, gpus: Ints, ns: Ints, hops: Ints, again: Bools, late: int
) -> Ints:
    """Give each line of ops the earliest place that is free on its GPU, one after the other.

    Args:
        period: in ns.
        in_turn: lines, those of F and B as a micro-batch passes them, then those of W.
        gpus: by line.
        ns: by line, of an op; lines of W have none where a backward is whole.
        hops: by line, what its output takes to the next one, in ns.
        again: by turn, whether the second place is taken.
        late: how far W is behind B, in ns.

    Returns:
        By line, when it starts, in ns; where nothing is free, what would be the best.
    """
    lines = in_turn.size
    stages = lines // 3
    busy, starts = np.empty((gpus.max() + 1, 2, 1 + lines), np.int64), np.empty(lines, np.int64)
    for table in busy:
        clear(table, period)
    now = 0
    for turn in range(lines):
        line = in_turn[turn]
        if line >= 2 * stages:
            now = starts[line - stages] + ns[line - stages] + late
        if ns[line] > 0:
            start = earliest_fit(busy[gpus[line]], now, ns[line])
            if start != NOWHERE and again[turn]:
                start = earliest_fit(busy[gpus[line]], start + ns[line], ns[line])
            if start != NOWHERE:
                add(busy[gpus[line]], start, ns[line])
                now = start
        starts[line] = now
        now += ns[line] + hops[line]
    return starts
