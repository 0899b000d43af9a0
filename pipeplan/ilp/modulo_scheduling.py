"""Modulo list scheduling as machine code: every op takes the nearest place that is free.

Ops are placed one after the other in the reservation tables of their GPUs and links, the ops of a
micro-batch at a stage in pairs: where the nearest places are the last that a GPU has, others are
taken (`free_places`).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pipeplan.ilp.compiled import Bools, Ints, Records, compiled
from pipeplan.ilp.free_places import fits_rest, insert, place_pair
from pipeplan.ilp.reservation_table import (
    NOWHERE,
    add,
    clear,
    earliest_fit,
    free_intervals,
    latest_fit,
    remove,
)

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
