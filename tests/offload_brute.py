"""Exhaustive search over transfers among given operations, by the device's rules alone."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from pipeplan.remat.schedules.costs import Costs
from pipeplan.remat.schedules.device_state import DeviceState
from pipeplan.remat.schedules.host_link import HostLink
from pipeplan.remat.schedules.schedule import FORWARDS, DeviceOp, DeviceOpKind, DeviceSchedule


def copy_of(device: DeviceState) -> DeviceState:
    """A state of its own, of the same costs."""
    copied = replace(
        device,
        full=set(device.full),
        tapes=set(device.tapes),
        places=dict(device.places),
        host=dict(device.host),
    )
    copied.pending, copied.settled = device.pending, device.settled
    copied.unit_bytes = list(device.unit_bytes)
    copied.queue.pending = list(device.queue.pending)
    return copied


@dataclass
class _Search:
    costs: Costs
    base: DeviceSchedule
    budget: int
    channel: HostLink
    best: int | None = None
    seen: dict[object, list[tuple[int, ...]]] = field(default_factory=dict)

    def visit(self, at: int, device: DeviceState, clocks: list[int], done: dict[int, int]) -> None:
        """All ways on from operation `at`; `clocks` are those of compute, out and back."""
        rest = sum(self._time(op) for op in self.base.ops[at:])
        late = self.best is not None and clocks[0] + rest >= self.best
        if late or self._beaten(at, device, clocks, done):
            return
        if at == len(self.base.ops):
            self.best = max(clocks) if self.best is None else min(self.best, max(clocks))
            return
        op = self.base.ops[at]
        if device.refusal(op) is None and device.during(op) <= self.budget:
            after = copy_of(device)
            after.apply(op)
            self.visit(at + 1, after, [clocks[0] + self._time(op), *clocks[1:]], done)
        else:
            for unit in {each.unit for each in device.queue.pending}:
                after = copy_of(device)
                after.apply(DeviceOp(DeviceOpKind.WAIT, unit))
                self.visit(at, after, [max(clocks[0], done[unit]), *clocks[1:]], done)
        for unit in range(self.costs.layers):
            for kind in (DeviceOpKind.OFFLOAD, DeviceOpKind.PREFETCH):
                self._issue(at, device, clocks, done, DeviceOp(kind, unit))

    def _issue(
        self, at: int, device: DeviceState, clocks: list[int], done: dict[int, int], op: DeviceOp
    ) -> None:
        out = op.kind is DeviceOpKind.OFFLOAD
        if (
            device.refusal(op) is not None
            or device.during(op) > self.budget
            or (out and (op.index in done or op.index > device.pending))
        ):
            return
        way = 2 if self.channel.duplex and not out else 1
        after, times = copy_of(device), list(clocks)
        start = max(clocks[0], clocks[way], done.get(op.index, 0))
        times[way] = start + self.channel.time_ns(device.size(op.index))
        after.apply(op)
        self.visit(at, after, times, {**done, op.index: times[way]})

    def _beaten(
        self, at: int, device: DeviceState, clocks: list[int], done: dict[int, int]
    ) -> bool:
        places = tuple(device.place(unit) for unit in range(self.costs.layers + 1))
        moved = tuple(sorted(done))
        key = (at, places, tuple(device.queue.pending), moved)
        mine = (*clocks, *(done[unit] for unit in moved))
        known = self.seen.setdefault(key, [])
        if any(all(a <= b for a, b in zip(each, mine, strict=True)) for each in known):
            return True
        known.append(mine)
        return False

    def _time(self, op: DeviceOp) -> int:
        if op.kind in FORWARDS:
            return self.costs.forward[op.index]
        return self.costs.backward[op.index] if op.kind is DeviceOpKind.BACKWARD else 0


def fastest_offloading(
    costs: Costs, base: DeviceSchedule, budget: int, channel: HostLink
) -> int | None:
    """Least makespan of `base` with any transfers that keep the budget; each unit leaves once."""
    search = _Search(costs, base, budget, channel)
    search.visit(0, DeviceState(costs, channel.duplex), [0, 0, 0], {})
    return search.best
