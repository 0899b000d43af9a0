"""Least span V of a contiguous 1F1B stage that offloads: what it can offload, and how long it
waits.

With V = (n - 1) T + v of a stage (see `contiguous`), f + b <= v <= T, its GPU idles v - f - b
between a forward and the backward after it. A micro-batch whose bytes o take d each way leaves
right after its forward and is back right before its backward. Then, while F or B of one runs,

    d <= v - f - b                      all n - 1 others are away; while nothing runs and
                                        2 d > v - f - b, all but two of the n
    d <= T - max(f, b),  full duplex    all but two of the n
    d <= T,              full duplex    all but three

and a stage that waits, with a larger v, comes to the first line. Under half duplex OFFLOAD and
PREFETCH share the way: both fit into the idle time of the first line, or one of them lies beside
F or B and ends within the period. The least V at which the bytes fit is a function of V alone,
never falls with it, and in a longer period, at the same v, everything above still holds: so the
program of `contiguous` stays exact and its bisection sound. Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pipeplan.cluster import Host
from pipeplan.ilp.segment_tables import Array

INFINITE: Final = 2**61
_EXACT = 2**62
SECOND = 10**9


@dataclass(frozen=True)
class OffloadBytes:
    """By first and last layer: what is free, kept, and may leave.

    Attributes:
        free: Of the GPU's memory beside the states.
        room: What is left of `free` beside one micro-batch while it runs.
        kept: By each micro-batch between its ops.
        levels: [m, ...] -> what of `kept` can leave, fewest first (`byte_options`).
        apart: Of `free`, beside the layer that needs most while it runs; None where a stage
            stays one.
        whole: What a layer keeps that leaves only as a whole: added to what must leave.
    """

    free: Array
    room: Array
    kept: Array
    levels: Array
    apart: Array | None = None
    whole: Array | None = None

    def at(self, here: NDArray[np.bool_]) -> OffloadBytes:
        """Of some of the segments."""
        apart, whole = (None if x is None else x[here] for x in (self.apart, self.whole))
        levels = self.levels[:, here]
        return OffloadBytes(
            self.free[here], self.room[here], self.kept[here], levels, apart, whole
        )


@dataclass(frozen=True)
class StageTiming:
    """By first and last layer: ns of V, of a forward, and of both computes; the period."""

    period: int
    spans: Array
    forward: Array
    load: Array


def min_span(host: Host, stay: StageTiming, size: OffloadBytes, open_: NDArray[np.bool_]) -> Array:
    """The least V >= `stay.spans` at which a stage fits by the lines above; else `INFINITE`.

    Args:
        host: Where the bytes wait, and the way to it.
        stay: V without offloading, `INFINITE` where there is none, and times.
        size: Bytes.
        open_: Where the answer matters; elsewhere it is `INFINITE`.
    """
    reach = np.full(stay.spans.shape, INFINITE)
    room = size.room if size.apart is None else np.maximum(size.room, size.apart)
    here = open_ & (stay.spans < INFINITE) & (room >= 0)
    if here.any():
        stay = StageTiming(stay.period, stay.spans[here], stay.forward[here], stay.load[here])
        size = size.at(here)
        reach[here] = _least(host, stay, size)
        if size.apart is not None:
            reach[here] = np.minimum(reach[here], _in_small_stages(host, stay, size))
    return reach


def _least(host: Host, stay: StageTiming, size: OffloadBytes) -> Array:
    copies = -(-stay.spans // stay.period)
    short = (copies - 1) * size.kept - size.room
    slack = stay.spans - (copies - 1) * stay.period - stay.load
    reach = np.where(short <= 0, stay.spans, INFINITE)
    for away, gap, fits in _ways(host, stay, size, copies, short, slack):
        fine = fits & (away > 0) & (gap <= stay.period - stay.load)
        until = stay.spans + np.maximum(0, gap - slack)
        reach = np.where(fine, np.minimum(reach, until), reach)
    return reach


def _in_small_stages(host: Host, stay: StageTiming, size: OffloadBytes) -> Array:
    """V of a stage whose layers are stages of their own: an estimate, nearly always too short.

    At the turn from F to B what is away has left during this F or before, and comes back during
    this B or behind it. F and B take longer where that takes longer. With one micro-batch the
    same bytes leave and come back; with more, those of two.
    """
    copies = -(-stay.spans // stay.period)
    short = np.maximum(0, (copies - 1) * size.kept - size.room)
    if size.whole is not None:
        short += np.where(short > 0, np.minimum(copies, 2) * size.whole, 0)
    ways = 1 + (host.duplex == "half")
    most = np.minimum(size.levels[-1], _bytes_in(host, stay.period // ways))
    turning = np.where(copies == 1, short, np.maximum(0, short - (copies - 2) * most))
    moved = transfer_ns(host, turning)
    backward = stay.load - stay.forward
    alone = np.maximum(0, moved - stay.forward) + np.maximum(0, moved - backward)
    waits = np.where(copies == 1, alone, np.maximum(0, moved - stay.load))
    slack = stay.spans - (copies - 1) * stay.period - stay.load
    fits = turning <= np.where(copies == 1, size.levels[-1], 2 * most)
    assert size.apart is not None
    fits &= (size.apart >= 0) & (stay.load + waits <= stay.period)
    longer = np.where(copies == 1, waits, np.maximum(0, waits - slack))
    fits &= (copies > 1) | (slack + waits + stay.load <= stay.period)
    return np.where(fits, stay.spans + longer, INFINITE)


def _bytes_in(host: Host, ns: Array | int) -> Array:
    """That cross the way to the host in some time."""
    found: Array = (np.asarray(ns) * (host.bandwidth_bytes_per_s / SECOND)).astype(np.int64)
    return found


def _ways(
    host: Host, stay: StageTiming, size: OffloadBytes, copies: Array, short: Array, slack: Array
) -> Iterator[tuple[Array, Array, NDArray[np.bool_]]]:
    """(micro-batches away, idle time they need, whether the rest is right) of each line above."""
    half, nothing = host.duplex == "half", np.zeros_like(copies)
    backward = stay.load - stay.forward
    longer, shorter = np.maximum(stay.forward, backward), np.minimum(stay.forward, backward)
    for fewer, most in ((2, stay.period - longer), (3, nothing + stay.period)):
        away = copies - fewer
        ns, fits = _moved(host, size, short, away)
        if half:
            fits &= (2 * ns <= stay.period) & (ns <= stay.period - slack - shorter)
        yield away, nothing, fits & (ns <= most)
    away, idle = copies - 1, copies * size.kept - size.free
    ns, fits = _moved(host, size, short, away)
    yield away, 2 * ns, fits
    if not half:
        # Two are here while nothing runs: what leaves of the others must be enough for that too.
        shared = -(-idle * away // np.maximum(1, away - 1))
        ns, fits = _moved(host, size, np.maximum(short, np.where(copies > 2, shared, 0)), away)
        yield away, ns, fits & ((copies > 2) | (idle <= 0))


def _moved(
    host: Host, size: OffloadBytes, short: Array, away: Array
) -> tuple[Array, NDArray[np.bool_]]:
    """How long the bytes take that each of `away` must send for `short` to be gone; if it can."""
    least = -(-np.maximum(short, 1) // np.maximum(away, 1))
    enough = size.levels >= least
    fits = enough[-1]
    chosen = np.argmax(enough, axis=0)
    return transfer_ns(host, size.levels[chosen, np.arange(len(chosen))]), fits


def transfer_ns(host: Host, size: Array) -> Array:
    """(H2); beyond 64-bit products a few ns more."""
    common = gcd(SECOND, host.bandwidth_bytes_per_s)
    over, under = SECOND // common, host.bandwidth_bytes_per_s // common
    if int(size.max(initial=0)) * over < _EXACT:
        return -(-size * over // under)
    rough: Array = np.ceil(size.astype(np.float64) * over / under).astype(np.int64)
    return rough + (rough >> 50) + 1
