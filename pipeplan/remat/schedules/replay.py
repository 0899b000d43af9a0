"""Replay of a schedule, by rule, by byte and by time: the one judge of every planner.

Computation and transfers overlap: the device runs forwards and backwards in order on one queue,
transfers in order of issue on the channel; only `wait` ties the first to the second:
(T1)-(T4) of docs/reference/remat-rules.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.errors import InputError
from pipeplan.remat.schedules.costs import Costs
from pipeplan.remat.schedules.device_state import DeviceState
from pipeplan.remat.schedules.host_link import HostLink, Lanes, Transfer
from pipeplan.remat.schedules.schedule import DeviceOp, DeviceOpKind, DeviceSchedule

INSTANT = HostLink()
"""Where transfers take no time."""


@dataclass(frozen=True)
class ReplayedOp:
    """One replayed operation: when it runs, and the bytes on device and host meanwhile.

    A transfer's times are those on the channel, its bytes those from its issue on.
    """

    op: DeviceOp
    start_ns: int
    end_ns: int
    bytes: int
    moved: int = 0
    host_bytes: int = 0


@dataclass(frozen=True)
class Outcome:
    """What a schedule does: its steps, makespan, peak bytes, and every rule it breaks."""

    steps: tuple[ReplayedOp, ...]
    makespan_ns: int
    peak_bytes: int
    violations: tuple[str, ...]
    host_peak_bytes: int = 0

    @property
    def idle_ns(self) -> int:
        """Time in which the device computes nothing."""
        busy = sum(step.end_ns - step.start_ns for step in self.steps if step.op.computes)
        return self.makespan_ns - busy

    @property
    def peak_step(self) -> ReplayedOp:
        """The first operation that reaches the peak."""
        return max(self.steps, key=lambda step: step.bytes)


def judge(
    costs: Costs, schedule: DeviceSchedule, budget: int | None = None, channel: HostLink = INSTANT
) -> Outcome:
    """Replay `schedule` over `channel`.

    The replay ends at the first operation that is not allowed; a budget that is exceeded is
    reported for the first operation that does, and the replay goes on.
    """
    if schedule.layers != costs.layers:
        raise InputError(
            f"schedule: got one for {schedule.layers} layers, need {costs.layers}."
            " Plan this chain again."
        )
    device, lanes = DeviceState(costs, channel.duplex), Lanes(channel)
    steps: list[ReplayedOp] = []
    found: list[str] = []
    for number, op in enumerate(schedule.ops):
        refusal = device.refusal(op)
        if refusal is not None:
            return _outcome(steps, lanes, [*found, f"step {number}, {op}: {refusal}"])
        used = device.during(op)
        if budget is not None and used > budget and not found:
            found.append(f"step {number}, {op}: holds {used} bytes, need at most {budget}")
        moved = (
            device.size(op.index)
            if op.kind in (DeviceOpKind.OFFLOAD, DeviceOpKind.PREFETCH)
            else 0
        )
        times = _times(lanes, costs, op, moved)
        device.apply(op)
        steps.append(ReplayedOp(op, *times, used, moved, sum(device.host.values())))
    if device.pending >= 0:
        found.append(f"the end: the backward of layer {device.pending} is missing")
    return _outcome(steps, lanes, found)


def _outcome(steps: list[ReplayedOp], lanes: Lanes, found: list[str]) -> Outcome:
    peak = max((step.bytes for step in steps), default=0)
    host = max((step.host_bytes for step in steps), default=0)
    return Outcome(tuple(steps), lanes.end, peak, tuple(found), host)


def _times(lanes: Lanes, costs: Costs, op: DeviceOp, moved: int) -> tuple[int, int]:
    """Start and end of `op`."""
    if op.kind in (DeviceOpKind.OFFLOAD, DeviceOpKind.PREFETCH):
        return lanes.transfer(Transfer(op.index, op.kind is DeviceOpKind.OFFLOAD), moved)
    if op.kind is DeviceOpKind.WAIT:
        return lanes.wait(op.index)
    return lanes.run(costs.time(op))
