"""Transfers for chosen units, each as early as memory allows: the no-wait schedule.

(O4)-(O6) of docs/reference/remat-rules.md, after Proposition 1 and Lemma 3 of O. Beaumont, L.
Eyraud-Dubois, A. Shilova, *Optimal GPU-CPU Offloading Strategies for Deep Neural Network Training*
(2020).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeplan.remat.offloading.compute_order import ComputeOrder, OffloadUnit
from pipeplan.remat.schedules.host_link import HostLink, Transfer, TransferQueue
from pipeplan.remat.schedules.schedule import DeviceOp, DeviceOpKind, DeviceSchedule

Issues = Mapping[int, Sequence[DeviceOp]]
"""Transfers to issue before each position, in order."""


@dataclass(frozen=True)
class NoWaitSchedule:
    """A schedule, and the makespan its builder expects; the judge has the last word."""

    schedule: DeviceSchedule
    makespan_ns: int


def no_wait(
    line: ComputeOrder, chosen: Collection[int], budget: int, channel: HostLink, late: bool = True
) -> NoWaitSchedule | None:
    """Offload the `chosen` units in increasing, and prefetch them in decreasing order.

    Args:
        line: the operations.
        chosen: indices of units.
        budget: bytes of the device.
        channel: the way to the host.
        late: whether computation may wait until offloads have made room.

    Returns:
        None where some operation does not fit though all chosen units that may be are away.
    """
    order = sorted(chosen)
    return no_wait_in_order(line, order, order[::-1], budget, channel, late)


def no_wait_in_order(
    line: ComputeOrder,
    out: Sequence[int],
    back: Sequence[int],
    budget: int,
    channel: HostLink,
    late: bool = True,
    most_ns: int | None = None,
) -> NoWaitSchedule | None:
    """The no-wait schedule that offloads units in the order `out` and prefetches them in `back`.

    None also where a unit that comes back behind others would be late for its use, and where the
    time would be above `most_ns`.
    """
    known = {unit.index: unit for unit in line.units}
    positions = prefetch_positions(line, [known[index] for index in back], budget)
    if positions is None:
        return None
    issues: dict[int, list[DeviceOp]] = defaultdict(list)
    at = 0
    for index in out:
        at = max(at, known[index].ready)
        issues[at].append(DeviceOp(DeviceOpKind.OFFLOAD, index))
    for index in back:
        issues[positions[index]].append(DeviceOp(DeviceOpKind.PREFETCH, index))
    return with_transfers(line, issues, budget, channel, late, most_ns)


def prefetch_positions(
    line: ComputeOrder, back: Sequence[OffloadUnit], budget: int
) -> dict[int, int] | None:
    """(O5): the first operation that has room for each unit again; None if nothing fits."""
    room = budget - line.need
    for unit in back:
        room[unit.away : unit.due] += unit.size
    if (room < 0).any():
        return None
    first = max((unit.away for unit in back), default=0)
    found: dict[int, int] = {}
    for unit in back:
        tight = np.flatnonzero(room[first : unit.due] < unit.size)
        first = first + int(tight[-1]) + 1 if tight.size else first
        if first > unit.due:
            return None
        room[first : unit.due] -= unit.size
        found[unit.index] = first
    return found


@dataclass
class _Run:
    """The queue and the clock while `complete` goes through the operations."""

    line: ComputeOrder
    channel: HostLink
    budget: int
    queue: TransferQueue
    ops: list[DeviceOp] = field(default_factory=list)
    now: int = 0
    free: list[int] = field(default_factory=lambda: [0, 0])
    done: dict[int, int] = field(default_factory=dict)
    asked: tuple[deque[DeviceOp], deque[DeviceOp]] = field(
        default_factory=lambda: (deque(), deque())
    )
    """What is to be issued on each way, in order."""
    gone: int = 0
    """Bytes known to be on the host, and not called back."""

    def __post_init__(self) -> None:
        self.size = {unit.index: unit.size for unit in self.line.units}
        self.due: dict[int, list[int]] = defaultdict(list)
        for unit in self.line.units:
            self.due[unit.due].append(unit.index)
        self.need, self.time = self.line.need.tolist(), self.line.time.tolist()

    def ask(self, op: DeviceOp) -> None:
        """Put a transfer behind those of its way."""
        self.asked[self._way(op)].append(op)

    def issue(self, at: int) -> None:
        """All that can go now: offloads; of prefetches what `at` needs and what may begin."""
        for way in self.asked:
            needed = [DeviceOp(DeviceOpKind.PREFETCH, unit) for unit in self.due.get(at, ())]
            while way and (
                any(op in way for op in needed)
                or way[0].kind is DeviceOpKind.OFFLOAD
                or self._begins(at, way[0])
            ):
                self._issue(way.popleft())

    def _begins(self, at: int, op: DeviceOp) -> bool:
        """Whether a prefetch begins before `at` ends, and `at` need not wait for it."""
        start = self._start(op)
        if start > self.now and start >= self.now + self.time[at]:
            return False
        if op.index in self._leaving_before(at) and self.done[op.index] <= self.now:
            self.wait(op.index)
        if self.channel.between and self._leaving(op.index):
            return False
        return not self.exceeds(at, coming=op.index)

    def _way(self, op: DeviceOp) -> int:
        return int(self.channel.duplex and op.kind is DeviceOpKind.PREFETCH)

    def _start(self, op: DeviceOp) -> int:
        return max(self.now, self.free[self._way(op)], self.done.get(op.index, 0))

    def _leaving(self, unit: int) -> bool:
        return Transfer(unit, out=True) in self.queue.pending

    def _leaving_before(self, at: int) -> list[int]:
        """Units whose way out can have ended when `at` begins: those ahead of what `at` reads."""
        leaving = [each.unit for each in self.queue.pending if each.out]
        own = self.line.ops[at].index
        return leaving[: leaving.index(own)] if own in leaving else leaving

    def _issue(self, op: DeviceOp) -> None:
        out, way = op.kind is DeviceOpKind.OFFLOAD, self._way(op)
        self.free[way] = self._start(op) + self.channel.time_ns(self.size[op.index])
        self.done[op.index] = self.free[way]
        if not out and not self._leaving(op.index):
            self.gone -= self.size[op.index]
        self.queue.issue(Transfer(op.index, out))
        self.ops.append(op)

    def wait(self, unit: int) -> None:
        ended = self.queue.end(unit)
        left = {each.unit for each in ended if each.out}
        back = {each.unit for each in ended if not each.out}
        called = {each.unit for each in self.queue.pending}
        self.gone += sum(self.size[each] for each in left - back - called)
        self.now = max(self.now, self.done[unit])
        self.ops.append(DeviceOp(DeviceOpKind.WAIT, unit))

    def exceeds(self, at: int, coming: int | None = None) -> bool:
        """Whether `at` lacks room in the worst state of the queue, `coming` behind the others."""
        gone = self.gone
        if coming is not None and not self._leaving(coming):
            gone -= self.size[coming]
        here = self.need[at] - gone
        if here <= self.budget:
            # With all that is queued on the device; no state of the queue holds more.
            return False
        pending = self.queue.pending
        if coming is not None:
            pending = [*pending, Transfer(coming, out=False)]
        still = sum(self.size[unit] for unit in {each.unit for each in pending})
        op = self.line.ops[at]
        queue = TransferQueue(self.channel.duplex or self.channel.between, pending)
        most = queue.most(self.size.__getitem__, (op.index,) if op.computes else ())
        return bool(here - still + most > self.budget)

    def lacks(self, at: int, late: bool) -> bool | None:
        """One more wait that `at` needs, if any; None where none helps that is allowed."""
        pending, needed = self.queue.pending, self.due.get(at, ())
        coming = [each.unit for each in pending if each.unit in needed]
        if coming:
            self.wait(coming[0])
            return True
        if not self.exceeds(at):
            return False
        # A unit that was called back already can only be waited for until it is back.
        soonest = min(self._leaving_before(at), key=self.done.__getitem__, default=None)
        if soonest is None or not (late or self.done[soonest] <= self.now):
            return None
        self.wait(soonest)
        return True


def with_transfers(
    line: ComputeOrder,
    issues: Issues,
    budget: int,
    channel: HostLink,
    late: bool = True,
    most_ns: int | None = None,
) -> NoWaitSchedule | None:
    """(O5), (O6): the operations with the transfers of `issues` and the waits that they need.

    A prefetch is issued no sooner than it can begin. A wait comes before an operation that uses
    what comes back, and before one that lacks room while offloads are under way. None where no
    wait makes room, or one would last but `late` is not allowed, or `most_ns` is not kept.
    """
    run = _Run(line, channel, budget, TransferQueue(channel.duplex))
    for at, op in enumerate(line.ops):
        for each in issues.get(at, ()):
            run.ask(each)
        run.issue(at)
        while waited := run.lacks(at, late):
            run.issue(at)
        if waited is None:
            return None
        if most_ns is not None and run.now + line.rest[at] > most_ns:
            return None
        run.now += run.time[at]
        run.ops.append(op)
    return NoWaitSchedule(DeviceSchedule(line.layers, tuple(run.ops)), max(run.now, *run.free))
