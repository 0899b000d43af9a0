"""A line in whole slots of memory: (O7) of docs/reference/remat-rules.md.

Source: §5.3.2 of the offloading paper.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeplan.remat.channel import Channel
from pipeplan.remat.line import Ints, Line
from pipeplan.units import ceil_div

_SECOND = 10**9
_ENDLESS = 10**9
"""Slots that a channel without a bandwidth moves in any time above zero."""


@dataclass(frozen=True)
class Slots:
    """Sizes, room and durations of a line, in slots of `unit` bytes.

    Attributes:
        size: of each unit of the line.
        room: slots at each operation for units that could be away, none of them counted.
        time: slots that the channel moves during each operation.
    """

    line: Line
    unit: int
    size: Ints
    room: Ints
    time: Ints

    @property
    def spare(self) -> Ints:
        """Room at each operation where all units count, also those that cannot be away (O8)."""
        away = np.zeros(len(self.line.ops), dtype=np.int64)
        for unit, size in zip(self.line.units, self.size, strict=True):
            away[unit.away : unit.due] += size
        spare: Ints = self.room + int(self.size.sum()) - away
        return spare


def discretize(line: Line, budget: int, channel: Channel, slots: int, more: Ints) -> Slots:
    """The line in slots: room and times down, unit sizes by their sums, `more` added to each."""
    free = budget - line.static
    unit = ceil_div(free, slots)
    rest = line.need - line.leavable - line.static
    ends = np.cumsum([each.size for each in line.units], dtype=np.int64)
    return Slots(
        line,
        unit,
        np.diff(-(-ends // unit), prepend=0) + more,
        (free - rest) // unit,
        _durations(line, unit, channel),
    )


def _durations(line: Line, unit: int, channel: Channel) -> Ints:
    """Rounded down as sums from the outer end of each phase, so that they are never too long."""
    speed = channel.bandwidth
    if speed is None:
        return np.minimum(line.time, 1) * _ENDLESS

    def down(times: Ints) -> Ints:
        ends = [int(total) * speed // (unit * _SECOND) for total in np.cumsum(times)]
        whole = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        return np.array(whole, dtype=np.int64)

    ahead, behind = line.time[: line.turn], line.time[line.turn :]
    return np.concatenate([down(ahead), down(behind[::-1])[::-1]])
