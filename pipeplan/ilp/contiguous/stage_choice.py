"""The best stage that begins at each layer: the inner loop of the dynamic program, compiled.

A stage of layers i..j takes the first of its options, cheapest first, that fits; of all j the one
of the smallest V is taken. A stage that offloads may wait for its bytes, and a dearer option may
wait less: all of them are tried.

With V = (n - 1) T + v of a stage (see `dynamic_program`), f + b <= v <= T, its GPU idles
v - f - b between a forward and the backward after it. A micro-batch whose bytes o take d each way
leaves right after its forward and is back right before its backward. Then, while F or B of one
runs,

    d <= v - f - b                      all n - 1 others are away; while nothing runs and
                                        2 d > v - f - b, all but two of the n
    d <= T - max(f, b),  full duplex    all but two of the n
    d <= T,              full duplex    all but three

and a stage that waits, with a larger v, comes to the first line. Under half duplex OFFLOAD and
PREFETCH share the way: both fit into the idle time of the first line, or one of them lies beside
F or B and ends within the period. The least V at which the bytes fit is a function of V alone,
never falls with it, and in a longer period, at the same v, everything above still holds: so the
program stays exact and its bisection sound. Source: ours.
"""

from __future__ import annotations

from math import ceil
from typing import Final

import numpy as np

from pipeplan.ilp.compiled import Bools, Ints, compiled

INFINITE: Final = 2**61
"""V where nothing fits."""
_EXACT: Final = 2**62

Asked = tuple[int, bool, int, bool, int]
"""The period T in ns; whether a real number just below it is meant; the largest load in ns;
whether nothing waits, so that V is a plain sum; the most micro-batches a stage may keep, or -1."""
Gpu = tuple[Ints, Bools, float, int]
"""[i, j] -> ns of forward and backward; [i, j] -> whether layers i..j may be no stage; the speed,
by which what options take is divided; bytes."""
Options = tuple[Ints, Ints, Ints, Ints]
"""[i, j] -> how many options layers i..j have; [i, j, n] -> ns that one takes more, bytes kept by
each micro-batch, bytes needed beside those of all but one."""
HostWay = tuple[int, int, bool, bool]
"""Bytes times the first number over the second are ns of the way to the host; whether both ways
share it; whether layers may be stages of their own."""
Away = tuple[Ints, Ints, Ints, Ints, Ints]
"""[i, j] -> ns of the forward, bytes free beside the states; free beside the layer that needs
most while it runs, kept by a layer that leaves only as a whole, where layers are stages of their
own; [i, j, n, m] -> what can leave of what a micro-batch keeps, fewest bytes first."""
_NONE = np.zeros((0, 0), dtype=np.int64)
NOTHING_AWAY: Final[Away] = _NONE, _NONE, _NONE, _NONE, np.zeros((0, 0, 0, 0), dtype=np.int64)
"""Where nothing may leave."""
NO_HOST: Final[HostWay] = 1, 1, False, False


@compiled
def best_stages(
    asked: Asked,
    gpu: Gpu,
    options: Options,
    host: HostWay,
    away: Away,
    behind: Ints,
    spans: Ints,
    ends: Ints,
    chosen: Ints,
) -> None:
    """Fill in the smallest V of a stage in front, its last layer and option, by its first layer.

    Args:
        asked: what fits; where stages offload, the period is a whole number.
        gpu: where the stage is.
        options: of every stage, cheapest first.
        host: the way to it.
        away: what may leave; empty where nothing may.
        behind: [j] -> V of what is behind a stage that ends with layer j, the transfers included.
        spans: [i] -> V; `INFINITE` where nothing fits.
        ends: [i] -> the last layer.
        chosen: [i] -> the option.
    """
    period, just_below, limit, adds, most = asked
    loads, closed, speed, budget = gpu
    counts, more, saved, need = options
    forwards, free, apart, whole_layer, levels = away
    whole, rest = behind // period, behind % period
    for first in range(len(behind)):
        spans[first], ends[first], chosen[first] = INFINITE, first, -1
        for last in range(first, len(behind)):
            if loads[first, last] > limit:
                break
            if closed[first, last] or behind[last] >= INFINITE:
                continue
            for option in range(counts[first, last]):
                load = loads[first, last] + _longer(more[first, last, option], speed)
                begun = _begun(rest[last], load, period, adds)
                copies = whole[last] + _copies(begun, period, just_below)
                least = span = whole[last] * period + begun
                if load > limit or span >= spans[first] or 0 <= most < copies:
                    # What runs longer is no shorter, and keeps no fewer.
                    break
                room, kept = budget - need[first, last, option], saved[first, last, option]
                if not _fits(copies - 1, kept, room):
                    if not levels.size:
                        continue
                    stay = period, span, copies, forwards[first, last], load
                    beside = apart[first, last], whole_layer[first, last]
                    size = free[first, last], room, kept, beside[0], beside[1]
                    least = span_with_offload(stay, size, levels[first, last, option], host)
                if least < spans[first]:
                    spans[first], ends[first], chosen[first] = least, last, option


@compiled
def _longer(more: int, speed: float) -> int:
    """Ns that an option takes more on a GPU."""
    return more if speed == 1 else ceil(more / speed)


@compiled
def _begun(rest: int, load: int, period: int, adds: bool) -> int:
    """V with a load in front, less whole periods: `rest` and `load` are no longer than one."""
    passes = rest > 0 and rest + load > period and not adds
    return period + load if passes else rest + load


@compiled
def _copies(begun: int, period: int, just_below: bool) -> int:
    """Micro-batches in flight at least, of a V of at most two periods."""
    if just_below:
        return 1 + int(begun >= period) + int(begun >= 2 * period)
    return int(begun > 0) + int(begun > period)


@compiled
def _fits(others: int, kept: int, room: int) -> bool:
    """Whether there is room for what so many others keep; products of both may be too large."""
    return room >= 0 and (others <= 0 or kept == 0 or others <= room // kept)


Stay = tuple[int, int, int, int, int]
"""The period, V without offloading, micro-batches in flight, ns of a forward, of both computes."""
Size = tuple[int, int, int, int, int]
"""Bytes of the GPU beside the states, what is left of them beside one micro-batch while it runs,
kept of each between its ops; left beside the layer that needs most, kept by a layer that leaves
only as a whole, where layers are stages of their own."""


@compiled
def span_with_offload(stay: Stay, size: Size, levels: Ints, host: HostWay) -> int:
    """The least V at which a stage fits; `INFINITE` if at none.

    Args:
        stay: times.
        size: bytes.
        levels: what can leave of what is kept, fewest first.
        host: the way to it.
    """
    _, span, copies, _, _ = stay
    _, room, kept, apart, _ = size
    if _fits(copies - 1, kept, room):
        return span
    if not host[3]:
        return span_with_waits(stay, size, levels, host) if room >= 0 else INFINITE
    if room < 0 and apart < 0:
        return INFINITE
    least = span_with_waits(stay, size, levels, host)
    return min(least, span_in_small_stages(stay, size, levels, host))


@compiled
def span_with_waits(stay: Stay, size: Size, levels: Ints, host: HostWay) -> int:
    """The least V by the lines above of a stage that lacks memory; `INFINITE` if at none."""
    period, span, copies, forward, load = stay
    free, room, kept, _, _ = size
    half, backward = host[2], load - forward
    short = (copies - 1) * kept - room
    slack, spare = span - (copies - 1) * period - load, period - load
    longer, shorter = max(forward, backward), min(forward, backward)
    for others, most in ((copies - 2, period - longer), (copies - 3, period)):
        ns = _moved_ns(short, others, levels, host)
        shared = 2 * ns <= period and ns <= period - slack - shorter
        if ns <= most and (shared or not half):
            return span
    least = INFINITE
    others, idle = copies - 1, copies * kept - free
    ns = _moved_ns(short, others, levels, host)
    if 2 * ns <= spare:
        least = span + max(0, 2 * ns - slack)
    if not half and (copies > 2 or idle <= 0):
        # Two are here while nothing runs: what leaves of the others must be enough for that too.
        more = -(-idle * others // max(1, others - 1)) if copies > 2 else 0
        ns = _moved_ns(max(short, more), others, levels, host)
        if ns <= spare:
            least = min(least, span + max(0, ns - slack))
    return least


@compiled
def span_in_small_stages(stay: Stay, size: Size, levels: Ints, host: HostWay) -> int:
    """V of a stage whose layers are stages of their own: an estimate, nearly always too short.

    At the turn from F to B what is away has left during this F or before, and comes back during
    this B or behind it. F and B take longer where that takes longer. With one micro-batch the
    same bytes leave and come back; with more, those of two.
    """
    period, span, copies, forward, load = stay
    _, room, kept, apart, whole = size
    if apart < 0:
        return INFINITE
    backward, can = load - forward, levels[len(levels) - 1]
    short = max(0, (copies - 1) * kept - room)
    if short > 0:
        short += min(copies, 2) * whole
    slack = span - (copies - 1) * period - load
    if copies == 1:
        moved = transfer_ns(short, host)
        waits = max(0, moved - forward) + max(0, moved - backward)
        good = short <= can and slack + waits + load <= period
        return span + waits if good else INFINITE
    most = min(can, int(period // (2 if host[2] else 1) * (host[1] / host[0])))
    turning = max(0, short - (copies - 2) * most)
    waits = max(0, transfer_ns(turning, host) - load)
    good = turning <= 2 * most and load + waits <= period
    return span + max(0, waits - slack) if good else INFINITE


@compiled
def _moved_ns(short: int, others: int, levels: Ints, host: HostWay) -> int:
    """How long the bytes take that each of the others must send for `short` to be gone."""
    if others <= 0:
        return INFINITE
    least = -(-short // others)
    for level in levels:
        if level >= least:
            return transfer_ns(level, host)
    return INFINITE


@compiled
def transfer_ns(size: int, host: HostWay) -> int:
    """(H2); beyond 64-bit products a few ns more."""
    over, under = host[0], host[1]
    if size < _EXACT // over:
        return -(-size * over // under)
    rough = ceil(float(size) * over / under)
    return rough + (rough >> 50) + 1
