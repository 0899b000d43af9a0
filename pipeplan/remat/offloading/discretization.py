"""Discretization of an order and its units to whole slots of memory: (O7) of the rules.

docs/reference/remat-rules.md; §5.3.2 of O. Beaumont, L. Eyraud-Dubois, A. Shilova, *Optimal
GPU-CPU Offloading Strategies for Deep Neural Network Training* (2020).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeplan.remat.arrays import Ints
from pipeplan.remat.offloading.compute_order import ComputeOrder
from pipeplan.remat.schedules.host_link import HostLink
from pipeplan.units import ceil_div

_SECOND = 10**9
_ENDLESS = 10**9
"""Slots that a channel without a bandwidth moves in any time above zero."""


@dataclass(frozen=True)
class DiscretizedOrder:
    """Sizes, room and durations of a line, in slots of `unit` bytes.

    Attributes:
        size: of each unit of the line.
        room: slots at each operation for units that could be away, none of them counted.
        time: slots that the channel moves during each operation.
    """

    line: ComputeOrder
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


def discretize(
    line: ComputeOrder, budget: int, channel: HostLink, slots: int, more: Ints
) -> DiscretizedOrder:
    """The line in slots: room and times down, unit sizes by their sums, `more` added to each."""
    free = budget - line.static
    unit = ceil_div(free, slots)
    rest = line.need - line.leavable - line.static
    ends = np.cumsum([each.size for each in line.units], dtype=np.int64)
    return DiscretizedOrder(
        line,
        unit,
        np.diff(-(-ends // unit), prepend=0) + more,
        (free - rest) // unit,
        _durations(line, unit, channel),
    )


def _durations(line: ComputeOrder, unit: int, channel: HostLink) -> Ints:
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
