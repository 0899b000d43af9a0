"""Free intervals of a reservation table, and placing a pair of ops so that the rest still fits.

Nearest free places (`reservation_table`) split free time into pieces; on a GPU with several stages
and little idle time the last ops then fit nowhere although the pieces suffice in sum. Here a pair
takes the nearest places, inside free intervals or at either end of one, that leave intervals for
all the rest (best-fit decreasing bin packing, Johnson 1973). Such places exist as long as the
intervals before sufficed, since places at an end split nothing off. Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Final

from pipeplan.ilp.reservation_table import FreeInterval

MOST_PAIRS: Final = 400
"""Pairs of places looked at, nearest first."""


def fits_rest(intervals: Sequence[FreeInterval], rest: Sequence[int]) -> bool:
    """Whether ops of these lengths fit into the intervals, longest first into the tightest."""
    room = sorted(length for _, length in intervals)
    if not rest or (room and room[-1] >= sum(rest)):
        return True
    for length in sorted(rest, reverse=True):
        tightest = next((index for index, free in enumerate(room) if free >= length), None)
        if tightest is None:
            return False
        room[tightest] -= length
        room.sort()
    return True


def place_pair(
    intervals: list[FreeInterval],
    period: int,
    lengths: tuple[int, int],
    window: tuple[int, int],
    rest: Sequence[int],
) -> tuple[int, int] | None:
    """Starts of an op that ends before a window and of one that begins after it.

    Args:
        intervals: Free intervals of the table that both use.
        period: Of the ring.
        lengths: Of the op on the way in and the one on the way out.
        window: Instants by which the first ends and from which the second may begin.
        rest: Lengths of ops that come later and must still find room.

    Returns:
        The two starts with the least waiting, or None if none was found.
    """
    long_in, long_out = lengths
    latest, earliest = window[0] - long_in, window[1]
    ins = sorted(
        {
            earlier
            for interval in intervals
            for earlier in _before(interval, latest, long_in, period)
        }
    )
    ins.reverse()
    outs = sorted(
        {later for interval in intervals for later in _after(interval, earliest, long_out, period)}
    )
    for one, other in _nearest([latest - x for x in ins], [x - earliest for x in outs]):
        left = _carve(intervals, outs[other], long_out, period)
        left = None if left is None else _carve(left, ins[one], long_in, period)
        if left is not None and fits_rest(left, rest):
            return ins[one], outs[other]
    return None


def _after(interval: FreeInterval, time: int, length: int, period: int) -> Iterator[int]:
    """Starts from `time` on: at once, if that lies in the interval, and at both of its ends."""
    begin, size = interval
    if size < length:
        return
    if (time - begin) % period + length <= size:
        yield time
    yield time + (begin - time) % period
    yield time + (begin + size - length - time) % period


def _before(interval: FreeInterval, time: int, length: int, period: int) -> Iterator[int]:
    """Starts up to `time`: at once, if that lies in the interval, and at both of its ends."""
    begin, size = interval
    if size < length:
        return
    if (time - begin) % period + length <= size:
        yield time
    yield time - (time - begin) % period
    yield time - (time - begin - size + length) % period


def _nearest(ins: list[int], outs: list[int]) -> Iterator[tuple[int, int]]:
    """Indices into both lists of waits, each rising, by rising sum."""
    if not ins or not outs:
        return
    heap, seen = [(ins[0] + outs[0], 0, 0)], {(0, 0)}
    for _ in range(MOST_PAIRS):
        if not heap:
            return
        _, one, other = heappop(heap)
        yield one, other
        for a, b in ((one + 1, other), (one, other + 1)):
            if a < len(ins) and b < len(outs) and (a, b) not in seen:
                seen.add((a, b))
                heappush(heap, (ins[a] + outs[b], a, b))


def _carve(
    intervals: list[FreeInterval], start: int, length: int, period: int
) -> list[FreeInterval] | None:
    """The intervals without an op; None if it lies in none of them."""
    for index, (begin, size) in enumerate(intervals):
        offset = (start - begin) % period
        if offset + length <= size:
            pieces = [
                (begin, offset),
                ((begin + offset + length) % period, size - offset - length),
            ]
            rest = [piece for piece in pieces if piece[1]]
            return [*intervals[:index], *rest, *intervals[index + 1 :]]
    return None
