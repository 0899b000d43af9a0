"""The events of list scheduling, as machine code: what `list_scheduler` says in words.

Ops of one kind of a stage are a *line*: micro-batches take their turns in order. Lines are
numbered kind * stages + stage, with kinds F, B (or I) and W; the transfer of a line's output has
the number of the line + 3 * stages.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from typing import Final

import numpy as np

from pipeplan.ilp.compiled import Floats, Ints, Records, compiled

KINDS: Final = 3
F, B, W = range(KINDS)

_STAYS: Final = ("gpu", "ns", "input", "saved", "left", "to", "link", "hop_ns", "sent", "received")
_CHANGES: Final = ("expected", "ready", "begun")

LINE: Final = np.dtype([(name, np.int64) for name in (*_STAYS, *_CHANGES)])
"""Of every line: its GPU and an op's ns; bytes of the input that lies there until an op starts,
bytes that the op keeps from its start, and what its end leaves of all that the stage keeps (less
than 0: it frees them); the line that gets its output (-1: none), over which link (-1: it is on
the same GPU) in how many ns, with how many bytes at either end; then micro-batches whose input is
on its way or there, is there, and that have begun."""

GPU: Final = np.dtype(
    [(name, np.int64) for name in ("first", "behind", "room", "whole", "work", "held")]
    + [("busy", np.bool_), ("concerned", np.bool_)]
)
"""Of every GPU: where its stages are in the list of all, and end; bytes that it may keep, and
that a micro-batch keeps in all its stages; ns of all its ops of one micro-batch; then bytes that
it keeps now, whether an op runs, and whether something may start."""

Queue = list[tuple[int, int, int]]
"""Time, number and line of what ends."""


@compiled
def simulate(
    lines: Records,
    gpus: Records,
    by_gpu: Ints,
    ranks: Floats,
    in_flight: Ints,
    links: int,
    patience: int,
    horizon: float,
    starts: Ints,
    ends: Ints,
) -> tuple[bool, int, int]:
    """Run events in order of time; after each, every idle GPU that it concerns takes an op.

    Args:
        lines: as `LINE` says; changed.
        gpus: as `GPU` says; changed.
        by_gpu: stages, GPU by GPU.
        ranks: by line and micro-batch, in ns.
        in_flight: by stage, the most micro-batches.
        links: how many there are.
        patience: for how long a GPU waits for an op that ranks first, in ns.
        horizon: a step that ends then or later is given up.
        starts: by line or transfer, and by micro-batch; filled in.
        ends: by GPU, of its last op; filled in.

    Returns:
        whether all ops have run, the time of the last event, and how many events there were.
    """
    arrivals = np.zeros(ranks.shape, np.int64)
    link_free = np.zeros(links, np.int64)
    queue = [(0, 0, 0)]
    queue.clear()
    now, events = 0, 0
    while True:
        for gpu in range(len(gpus)):
            own = gpus[gpu]
            if not own.concerned:
                continue
            own.concerned = False
            if own.busy:
                continue
            if now >= horizon - own.work:
                return False, now, events
            chosen = _first(lines, gpus, by_gpu, ranks, in_flight, arrivals, gpu, now + patience)
            if chosen >= 0 and lines[chosen].begun < lines[chosen].ready:
                events += 1
                _start(lines, own, arrivals, starts, chosen, now)
                heappush(queue, (now + lines[chosen].ns, events, chosen))
        if len(queue) == 0:
            break
        now = queue[0][0]
        while len(queue) > 0 and queue[0][0] == now:
            number = heappop(queue)[2]
            events += _end(lines, gpus, link_free, starts, ends, queue, number, now, events)
    done = True
    for number in range(len(lines)):
        used = number < W * in_flight.size or lines[number].ns > 0
        done &= not used or lines[number].begun == ranks.shape[1]
    return done, now, events


@compiled
def _first(
    lines: Records,
    gpus: Records,
    by_gpu: Ints,
    ranks: Floats,
    in_flight: Ints,
    arrivals: Ints,
    gpu: int,
    soon: int,
) -> int:
    """The line that ranks first of those that may start or are worth waiting for; -1: none."""
    best, chosen, stages = inf, -1, in_flight.size
    for place in range(gpus[gpu].first, gpus[gpu].behind):
        for kind in (W, B, F):
            number = kind * stages + by_gpu[place]
            line = lines[number]
            turn = line.begun
            if turn == ranks.shape[1] or ranks[number, turn] >= best:
                continue
            if turn >= line.ready and (turn >= line.expected or arrivals[number, turn] > soon):
                continue
            if kind == F and not _may_enter(lines, gpus[gpu], by_gpu, in_flight, number):
                continue
            best, chosen = ranks[number, turn], number
    return chosen


@compiled
def _may_enter(lines: Records, gpu: Records, by_gpu: Ints, in_flight: Ints, stage: int) -> bool:
    """Whether a forward keeps its limit and leaves the GPU in a safe state."""
    stages = in_flight.size
    line = lines[stage]
    if line.begun - lines[B * stages + stage].begun >= in_flight[stage]:
        return False
    # The input that waits becomes part of what the forward keeps.
    free = gpu.room - gpu.held + line.input - line.saved
    first = by_gpu[gpu.first]
    for microbatch in range(lines[B * stages + first].begun, lines[first].begun + 1):
        if free >= gpu.whole or free < 0:
            break
        needs = returns = 0
        for place in range(gpu.first, gpu.behind):
            other = by_gpu[place]
            if lines[other].begun + (other == stage) <= microbatch:
                needs += lines[other].saved
            elif lines[B * stages + other].begun <= microbatch:
                returns += lines[other].saved
        if needs > free:
            return False
        free += returns
    return bool(free >= 0)


@compiled
def _start(
    lines: Records, gpu: Records, arrivals: Ints, starts: Ints, number: int, now: int
) -> None:
    """An op starts: its input is its own, and its output is expected."""
    line = lines[number]
    starts[number, line.begun] = now
    line.begun += 1
    gpu.busy = True
    gpu.work -= line.ns
    gpu.held += line.saved - line.input
    if line.to >= 0:
        arrivals[line.to, lines[line.to].expected] = now + line.ns + line.hop_ns
        lines[line.to].expected += 1


@compiled
def _end(
    lines: Records,
    gpus: Records,
    link_free: Ints,
    starts: Ints,
    ends: Ints,
    queue: Queue,
    number: int,
    now: int,
    events: int,
) -> int:
    """An op or a transfer ends; 1 if that begins another transfer."""
    if number >= len(lines):
        line = lines[number - len(lines)]
        gpus[line.gpu].held -= line.sent
        _arrive(lines, gpus, line.to)
        return 0
    line, stages = lines[number], len(lines) // KINDS
    gpu = gpus[line.gpu]
    gpu.busy, gpu.concerned, ends[line.gpu] = False, True, now
    gpu.held += line.left
    if B * stages <= number < W * stages and lines[number + stages].ns > 0:
        lines[number + stages].ready += 1
    if line.to < 0:
        return 0
    gpus[lines[line.to].gpu].held += line.received
    if line.link < 0:
        _arrive(lines, gpus, line.to)
        return 0
    start = max(now, link_free[line.link])
    link_free[line.link] = start + line.hop_ns
    gpu.held += line.sent
    number += len(lines)
    starts[number, line.begun - 1] = start
    heappush(queue, (start + line.hop_ns, events + 1, number))
    return 1


@compiled
def _arrive(lines: Records, gpus: Records, number: int) -> None:
    """An input is there."""
    lines[number].ready += 1
    gpus[lines[number].gpu].concerned = True
