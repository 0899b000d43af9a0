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
    _begin(stages, busy, lengths, period, copies)
    opening, closing = centres.copy(), centres.copy()
    for number in range(count - 1, -1, -1):
        found = stages[number].out < 0 or _send(
            stages[number], number, busy, lengths, opening, closing, times
        )
        if not found or not _compute(
            stages[number], number, busy, lengths, opening, closing, times
        ):
            return count - 1 - number
    return count


@compiled
def _begin(stages: Records, busy: Ints, lengths: Ints, period: int, copies: int) -> None:
    """Clear the tables that stages name; by GPU, list lengths of the ops that are to be placed."""
    for stage in stages:
        clear(busy[stage.gpu], period)
        if stage.out >= 0:
            clear(busy[stage.out], period)
            clear(busy[stage.back], period)
    for stage in stages:
        for _ in range(copies):
            insert(lengths[stage.gpu], stage.forward)
            insert(lengths[stage.gpu], stage.backward)


@compiled
def _send(
    stage: Records,
    number: int,
    busy: Ints,
    lengths: Ints,
    opening: Ints,
    closing: Ints,
    times: Ints,
) -> bool:
    """Place both transfers of the cut behind a stage, whether there is room."""
    found = _pairs(
        busy[stage.out],
        busy[stage.back],
        stage.out == stage.back,
        stage.send_forward,
        stage.send_backward,
        opening,
        closing,
        lengths[stage.out],
    )
    for copy in range(opening.size):
        times[SEND_F, number, copy] = opening[copy]
        times[SEND_B, number + 1, copy] = closing[copy]
        closing[copy] += stage.send_backward
    return found


@compiled
def _compute(
    stage: Records,
    number: int,
    busy: Ints,
    lengths: Ints,
    opening: Ints,
    closing: Ints,
    times: Ints,
) -> bool:
    """Place F and B of a stage, whether there is room."""
    for copy in range(opening.size):
        opening[copy] -= stage.in_wait
        closing[copy] += stage.out_wait
    own = busy[stage.gpu]
    found = _pairs(
        own, own, True, stage.forward, stage.backward, opening, closing, lengths[stage.gpu]
    )
    for copy in range(opening.size):
        times[F, number, copy], times[B, number, copy] = opening[copy], closing[copy]
        closing[copy] += stage.backward
    return found


@compiled
def _pairs(
    table_in: Ints,
    table_out: Ints,
    same: bool,
    long_in: int,
    long_out: int,
    opening: Ints,
    closing: Ints,
    rest: Ints,
) -> bool:
    """Place an op on the way in and its counterpart on the way out, for all copies.

    Copies are alike, so their starts are handed out in order: FIFO (R5).

    Args:
        table_in: of the way in.
        table_out: of the way out.
        same: whether that is the same one.
        long_in: of the first op, in ns.
        long_out: of the other one.
        opening: by copy, when the first op must end; then, when it starts.
        closing: by copy, from when on the other one may begin; then, when it starts.
        rest: how many ops of the table must find room, and their lengths, rising; the copies' are
            taken out. On links there are none.

    Returns:
        Whether there is room.
    """
    copies = opening.size
    ins, outs = np.zeros(copies + 1, np.int64), np.zeros(copies + 1, np.int64)
    for copy in range(copies):
        end, begin = opening[copy], closing[copy]
        if rest[0] > 0:
            _take(rest, long_in)
            _take(rest, long_out)
        start, later = _nearest_pair(table_in, table_out, long_in, long_out, end, begin)
        if start != NOWHERE and rest[0] > 0 and not fits_rest(free_intervals(table_in), rest):
            remove(table_in, start, long_in)
            remove(table_in, later, long_out)
            start = NOWHERE
        if start == NOWHERE and same:
            free = free_intervals(table_in)
            period = table_in[1, 0]
            start, later = place_pair(free, period, long_in, long_out, end, begin, rest)
            if start != NOWHERE:
                add(table_in, start, long_in)
                add(table_in, later, long_out)
        if start == NOWHERE:
            return False
        insert(ins, start)
        insert(outs, later)
    for copy in range(copies):
        opening[copy], closing[copy] = ins[copy + 1], outs[copy + 1]
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
def _take(lengths: Ints, length: int) -> None:
    """Undo `insert`."""
    at = 1
    while lengths[at] != length:
        at += 1
    lengths[0] -= 1
    for later in range(at, lengths[0] + 1):
        lengths[later] = lengths[later + 1]


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
        again: by place of `in_turn`, whether the second place is taken.
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
    for place in range(lines):
        line = in_turn[place]
        if line >= 2 * stages:
            now = starts[line - stages] + ns[line - stages] + late
        if ns[line] > 0:
            start = earliest_fit(busy[gpus[line]], now, ns[line])
            if start != NOWHERE and again[place]:
                start = earliest_fit(busy[gpus[line]], start + ns[line], ns[line])
            if start != NOWHERE:
                add(busy[gpus[line]], start, ns[line])
                now = start
        starts[line] = now
        now += ns[line] + hops[line]
    return starts
