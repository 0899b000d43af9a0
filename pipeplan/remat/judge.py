"""The one judge of every planner: replay a schedule, by rule, by byte and by time.

Computation and transfers overlap: the device runs forwards and backwards in order on one queue,
transfers one at a time in order of issue on another; only `wait` ties the first to the second:
(T1)-(T4) of docs/remat.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.errors import InputError
from pipeplan.remat.costs import Costs
from pipeplan.remat.device import Device
from pipeplan.remat.schedule import FORWARDS, Op, OpKind, Schedule
from pipeplan.units import ceil_div

_SECOND = 10**9


@dataclass(frozen=True)
class Step:
    """One replayed operation: when it runs, and the bytes on the device meanwhile.

    A transfer's times are those on the transfer queue, its bytes those from its issue on.
    """

    op: Op
    start_ns: int
    end_ns: int
    bytes: int
    moved: int = 0


@dataclass(frozen=True)
class Outcome:
    """What a schedule does: its steps, makespan, peak bytes, and every rule it breaks."""

    steps: tuple[Step, ...]
    makespan_ns: int
    peak_bytes: int
    violations: tuple[str, ...]

    @property
    def peak_step(self) -> Step:
        """The first operation that reaches the peak."""
        return max(self.steps, key=lambda step: step.bytes)


def judge(
    costs: Costs, schedule: Schedule, budget: int | None = None, bandwidth: int | None = None
) -> Outcome:
    """Replay `schedule`; `bandwidth` is bytes per second, None where transfers take no time.

    The replay ends at the first operation that is not allowed; a budget that is exceeded is
    reported for the first operation that does, and the replay goes on.
    """
    if schedule.layers != costs.layers:
        raise InputError(
            f"schedule: got one for {schedule.layers} layers, need {costs.layers}."
            " Plan this chain again."
        )
    device, clock = Device(costs), _Clock(costs, bandwidth)
    steps: list[Step] = []
    found: list[str] = []
    for number, op in enumerate(schedule.ops):
        refusal = device.refusal(op)
        if refusal is not None:
            return _outcome(steps, clock, [*found, f"step {number}, {op}: {refusal}"])
        used = device.during(op)
        if budget is not None and used > budget and not found:
            found.append(f"step {number}, {op}: holds {used} bytes, need at most {budget}")
        moved = device.size(op.index) if op.kind in (OpKind.OFFLOAD, OpKind.PREFETCH) else 0
        steps.append(Step(op, *clock.run(op, moved), used, moved))
        device.apply(op)
    if device.pending >= 0:
        found.append(f"the end: the backward of layer {device.pending} is missing")
    return _outcome(steps, clock, found)


def _outcome(steps: list[Step], clock: _Clock, found: list[str]) -> Outcome:
    peak = max((step.bytes for step in steps), default=0)
    return Outcome(tuple(steps), max(clock.compute, clock.channel), peak, tuple(found))


class _Clock:
    """When the two queues are free next."""

    def __init__(self, costs: Costs, bandwidth: int | None) -> None:
        self.costs, self.bandwidth = costs, bandwidth
        self.compute = self.channel = 0
        self.done: dict[int, int] = {}

    def run(self, op: Op, moved: int) -> tuple[int, int]:
        """Start and end of `op`."""
        if op.kind in (OpKind.OFFLOAD, OpKind.PREFETCH):
            start = max(self.compute, self.channel)
            self.channel = start + self._transfer(moved)
            self.done[op.index] = self.channel
            return start, self.channel
        start = self.compute
        if op.kind in FORWARDS:
            self.compute += self.costs.forward[op.index]
        elif op.kind is OpKind.BACKWARD:
            self.compute += self.costs.backward[op.index]
        elif op.kind is OpKind.WAIT:
            self.compute = max(start, self.done[op.index])
        return start, self.compute

    def _transfer(self, moved: int) -> int:
        return 0 if self.bandwidth is None else ceil_div(moved * _SECOND, self.bandwidth)
