"""The modulo reservation table of one resource: its busy intervals, and the nearest free ones.

The term is Rau's (1994) for modulo scheduling. An interval without length still keeps others from
lying across it, as (R3) and (R4) ask.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

FreeInterval = tuple[int, int]
"""(start, length) of a free arc; the start is less than the period."""


class ReservationTable:
    """Disjoint arcs on a circle of one period."""

    __slots__ = ("_ends", "_starts", "period")

    def __init__(self, period: int) -> None:
        self.period = period
        self._starts: list[int] = []
        self._ends: list[int] = []
        """Of the arc at the same index; beyond the period where it wraps."""

    def add(self, start: int, length: int) -> None:
        """Occupy [start, start + length) modulo the period; it must be free."""
        offset = start % self.period
        # an arc without length comes before one that starts with it
        index = (bisect_right if length else bisect_left)(self._starts, offset)
        self._starts.insert(index, offset)
        self._ends.insert(index, offset + length)

    def remove(self, start: int, length: int) -> None:
        """Undo `add`."""
        offset = start % self.period
        index = bisect_left(self._starts, offset)
        while self._ends[index] != offset + length:
            index += 1
        del self._starts[index], self._ends[index]

    def free_intervals(self) -> list[FreeInterval]:
        """All free arcs of some length."""
        starts, ends, period = self._starts, self._ends, self.period
        if not starts:
            return [(0, period)]
        following = [*starts[1:], starts[0] + period]
        gaps = zip(ends, following, strict=True)
        return [(end % period, start - end) for end, start in gaps if start > end]

    def earliest_fit(self, time: int, length: int) -> int | None:
        """The earliest start >= `time` at which `length` is free; None if nowhere."""
        starts, ends, period = self._starts, self._ends, self.period
        count = len(starts)
        if not count:
            return time if length <= period else None
        offset = time % period
        index = bisect_right(starts, offset) - 1
        at = max(offset, ends[index] - (period if index < 0 else 0))
        for other in range(index + 1, index + 2 + count):
            turn, arc = divmod(other, count)
            if at + length <= starts[arc] + turn * period:
                return time - offset + at
            at = max(at, ends[arc] + turn * period)
        return None

    def latest_fit(self, time: int, length: int) -> int | None:
        """The latest start at which `length` is free and ends by `time`; None if nowhere."""
        starts, ends, period = self._starts, self._ends, self.period
        count = len(starts)
        if not count:
            return time - length if length <= period else None
        offset = time % period
        index = bisect_left(starts, offset)
        at = offset
        for other in range(index - 1, index - 2 - count, -1):
            turn, arc = divmod(other, count)
            if ends[arc] + turn * period <= at - length:
                return time - offset + at - length
            at = min(at, starts[arc] + turn * period)
        return None
