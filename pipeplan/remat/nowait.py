"""Transfers for chosen units, in order and as early as memory allows: the no-wait schedule.

(O4)-(O6) of docs/remat.md, after Proposition 1 and Lemma 3 of O. Beaumont, L. Eyraud-Dubois,
A. Shilova, *Optimal GPU-CPU Offloading Strategies for Deep Neural Network Training* (2020).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from pipeplan.remat.channel import Channel, Queue, Transfer
from pipeplan.remat.line import Line, Unit
from pipeplan.remat.schedule import Op, OpKind, Schedule

Issues = Mapping[int, Sequence[Op]]
"""Transfers to issue before each position, in order."""


@dataclass(frozen=True)
class Timed:
    """A schedule, and the makespan its builder expects; the judge has the last word."""

    schedule: Schedule
    makespan_ns: int


def no_wait(
    line: Line, chosen: Collection[int], budget: int, channel: Channel, late: bool = True
) -> Timed | None:
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
    units = [unit for unit in line.units if unit.index in chosen]
    back = prefetch_positions(line, units, budget)
    if back is None:
        return None
    issues: dict[int, list[Op]] = defaultdict(list)
    for unit in units:
        issues[unit.ready].append(Op(OpKind.OFFLOAD, unit.index))
    for unit in reversed(units):
        issues[back[unit.index]].append(Op(OpKind.PREFETCH, unit.index))
    return complete(line, issues, budget, channel, late)


def prefetch_positions(line: Line, units: Sequence[Unit], budget: int) -> dict[int, int] | None:
    """(O5): before which operation each unit's way back is issued; None if nothing fits."""
    room = budget - line.need
    for unit in units:
        room[unit.away : unit.due] += unit.size
    if (room < 0).any():
        return None
    first = max((unit.away for unit in units), default=0)
    found: dict[int, int] = {}
    for unit in reversed(units):
        tight = np.flatnonzero(room[first : unit.due] < unit.size)
        first = first + int(tight[-1]) + 1 if tight.size else first
        room[first : unit.due] -= unit.size
        found[unit.index] = first
    return found


@dataclass
class _Run:
    """The queue and the clock while `complete` goes through the operations."""

    line: Line
    channel: Channel
    queue: Queue
    ops: list[Op] = field(default_factory=list)
    now: int = 0
    free: list[int] = field(default_factory=lambda: [0, 0])
    done: dict[int, int] = field(default_factory=dict)
    gone: int = 0
    """Bytes known to be on the host, and not called back."""

    def __post_init__(self) -> None:
        self.size = {unit.index: unit.size for unit in self.line.units}

    def issue(self, op: Op) -> None:
        out = op.kind is OpKind.OFFLOAD
        way = int(self.channel.duplex and not out)
        start = max(self.now, self.free[way], self.done.get(op.index, 0))
        self.free[way] = start + self.channel.time_ns(self.size[op.index])
        self.done[op.index] = self.free[way]
        if not out and Transfer(op.index, out=True) not in self.queue.pending:
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
        self.ops.append(Op(OpKind.WAIT, unit))

    def held(self, at: int) -> int:
        """Bytes during the operation at `at`, by the worst state of the queue."""
        queued = {each.unit for each in self.queue.pending}
        op = self.line.ops[at]
        still = sum(self.size[unit] for unit in queued)
        most = self.queue.most(self.size.__getitem__, op.index if op.computes else None)
        return int(self.line.need[at]) - self.gone - still + most


def complete(
    line: Line, issues: Issues, budget: int, channel: Channel, late: bool = True
) -> Timed | None:
    """(O6): the operations with the transfers of `issues` and the waits that they need.

    A wait comes before an operation that uses what comes back, and before one that lacks room
    while offloads are under way. None where no wait makes room, or one would last but `late` is
    not allowed.
    """
    run = _Run(line, channel, Queue(channel.duplex))
    due = {unit.due: unit.index for unit in line.units}
    for at, op in enumerate(line.ops):
        for each in issues.get(at, ()):
            run.issue(each)
        if any(each.unit == due.get(at) for each in run.queue.pending):
            run.wait(due[at])
        while run.held(at) > budget:
            # A unit that was called back already can only be waited for until it is back.
            leaving = [each.unit for each in run.queue.pending if each.out]
            soonest = min(leaving, key=run.done.__getitem__, default=None)
            if soonest is None or not (late or run.done[soonest] <= run.now):
                return None
            run.wait(soonest)
        run.now += int(line.time[at])
        run.ops.append(op)
    return Timed(Schedule(line.layers, tuple(run.ops)), max(run.now, *run.free))
