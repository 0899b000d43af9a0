"""Lower bounds on the time of any offloading: (B1)-(B4) of docs/reference/remat-rules.md.

(B1) is Proposition 3, (B3) Theorem 2 of O. Beaumont, L. Eyraud-Dubois, A. Shilova, *Optimal
GPU-CPU Offloading Strategies for Deep Neural Network Training* (2020); (B2) and (B4) are ours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pipeplan.remat.offloading.compute_order import ComputeOrder
from pipeplan.remat.offloading.idle_at_loss import idle_at_loss, phases
from pipeplan.remat.schedules.host_link import HostLink

_SECOND = 10**9
_SUMS = 4096
"""Sums of unit sizes to tell apart; where there are more, (B4) takes the bytes as they are."""


def paper_bound(line: ComputeOrder, budget: int, channel: HostLink) -> int:
    """(B1): all computation, or what must leave at the peak, moved out and back (Proposition 3).

    With independent directions, too: what leaves for the peak is back only behind it.
    """
    return max(line.compute, 2 * _moved_ns(max(0, line.peak - budget), channel))


def phase_bound(line: ComputeOrder, budget: int, channel: HostLink) -> int:
    """(B2): what each operation lacks must have left before it, and comes back behind it."""
    ends = np.cumsum(line.time)
    best = line.compute
    for need, time, end in zip(line.need, line.time, ends, strict=True):
        moved = _moved_ns(max(0, int(need) - budget), channel)
        before, after = int(end - time), line.compute - int(end)
        best = max(best, max(before, moved) + int(time) + max(after, moved))
    return best


def _moved_ns(size: int, channel: HostLink) -> int:
    """Time to move `size` bytes, rounded down: a bound must not."""
    return 0 if channel.bandwidth is None else size * _SECOND // channel.bandwidth


@dataclass
class _OffloadPhase:
    """Offloads of a phase while its operations run: amounts in bytes, times in bytes, too."""

    total: float
    ready: float = 0.0
    out: float = 0.0
    idle: float = 0.0
    slack: float = 0.0

    def run(self, time: float, lacking: float, also: float = 0.0) -> bool:
        """One operation that needs `lacking` bytes away; `also` may leave from its start on."""
        wait = max(0.0, lacking - self.out)
        if wait > self.ready - self.out:
            return False
        self.idle += wait
        self.out += wait
        self.ready = min(self.total, self.ready + also)
        moved = min(time, self.ready - self.out)
        self.out += moved
        self.slack = time - moved + (0.0 if wait or moved else self.slack)
        return True

    @property
    def left(self) -> float:
        """What is still to move at the end; below zero the time since the last transfer ended."""
        return self.total - self.out if self.out < self.total else -self.slack


def fluid_bound(line: ComputeOrder, budget: int, channel: HostLink) -> float | None:
    """(B3): the time of GREEDY where parts of units may be moved, which no offloading beats.

    For one transfer at a time. None where the budget is below `line.least`.
    """
    if line.least > budget:
        return None
    if channel.bandwidth is None:
        return float(line.compute)
    time = line.time * (channel.bandwidth / _SECOND)
    lacking = np.maximum(line.need - budget, 0).astype(np.float64)
    total = float(lacking.max())
    forward, backward = _OffloadPhase(total), _OffloadPhase(total)
    early = {unit.ready: unit.size for unit in line.units if unit.ready < unit.away}
    late = {unit.ready: unit.size for unit in line.units if unit.ready == unit.away}
    due = {unit.due: unit.size for unit in line.units}
    for at in range(line.turn):
        forward.ready = min(total, forward.ready + late.get(at, 0))
        forward.run(time[at], lacking[at], early.get(at, 0))
    forward.ready = total
    for at in range(len(line.ops) - 1, line.turn - 1, -1):
        backward.run(time[at], lacking[at])
        backward.ready = min(total, backward.ready + due.get(at, 0))
    room = total - lacking
    ahead, behind = phases(time, room, line.turn)
    one = np.zeros(1)
    between = idle_at_loss(one, one + forward.left, one + backward.left, ahead, behind)
    moved = float(time.sum()) + forward.idle + backward.idle + float(between[0])
    return moved * _SECOND / channel.bandwidth


def whole_bound(line: ComputeOrder, budget: int, channel: HostLink) -> float | None:
    """(B4): (B3) where each operation lacks what whole units can cover, not single bytes.

    What is away at an operation are whole units that may be away there. Their sum is at least the
    smallest one that covers what lacks, so no whole-unit schedule is lost by raising the need.
    """
    if line.least > budget:
        return None
    need = line.need.copy()
    for at in np.flatnonzero(need > budget):
        sizes = [unit.size for unit in line.units if unit.away <= at < unit.due]
        need[at] = budget + smallest_cover(sizes, int(need[at]) - budget)
    return fluid_bound(replace(line, need=need), budget, channel)


def smallest_cover(sizes: list[int], lacking: int) -> int:
    """The least sum of some of `sizes` that is at least `lacking`; `lacking` if hard to tell."""
    below, cover = np.zeros(1, dtype=np.int64), sum(sizes)
    for size in sizes:
        sums = np.unique(np.concatenate([below, below + size]))
        cover = min(cover, int(sums[sums >= lacking].min(initial=cover)))
        below = sums[sums < lacking]
        if len(below) > _SUMS:
            return lacking
    return cover
