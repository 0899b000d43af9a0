"""A run without a model: executor, programs and messages as always, ops that only pass time.

Everything but the layers is the real thing: the same executor walks the same lists and its
messages cross the same process group. So a dry run shows what a plan does on these processes
before there is a model, and on the virtual clock it shows exactly what the model of
docs/reference/model.md says: every action ends when the simulator's eager clock says, whatever the
machine is doing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from pipeplan.errors import InternalError
from pipeplan.plan import OpKind, Plan
from pipeplan.program import Pattern
from pipeplan.runtime.dry_run.clock import RankClock, SleepClock, VirtualClock
from pipeplan.runtime.dry_run.planned_times import PlannedTimes
from pipeplan.runtime.dry_run.sleeping import EmulatedHostLinks, HostLinks
from pipeplan.runtime.dry_run.timed_links import Crossing, TimedTransport, VirtualHostLinks
from pipeplan.runtime.executor import Executor
from pipeplan.runtime.interfaces import Observer
from pipeplan.runtime.supervision.flight_recorder import FlightRecorder
from pipeplan.runtime.supervision.stop_consensus import NeverStop
from pipeplan.runtime.transport.base import Pending, Transport
from pipeplan.runtime.transport.endpoints import StageEndpoints, endpoints
from pipeplan.split_model import TensorSpec

Kind = Literal["sleep", "virtual"]

_NOTHING = TensorSpec((0,), "torch.float32", True)
"""What a boundary carries: no bytes; the stamps beside it carry the time."""


class HostUpdates:
    """The host of a rank, which makes one stage's weights after the other (U7)."""

    def __init__(self) -> None:
        self._free = 0

    def behind(self, now: int, lasts: int) -> int:
        """When it has made, and brought back, what it may begin with `now`."""
        self._free = max(now, self._free) + lasts
        return self._free


class TimedStage:
    """Stands in for a stage: each op passes its planned time."""

    def __init__(
        self,
        times: PlannedTimes,
        index: int,
        clock: RankClock,
        ways: HostLinks,
        updates: HostUpdates,
    ) -> None:
        """Takes how long its ops last; `index` is its place among all stages."""
        self._updates = updates
        self._behind_ns = times.behind[index]
        self._microbatches = times.microbatches
        self._read_from = self._made = 0
        self._index = index
        self._ways = ways
        self._out: dict[int, Pending] = {}
        self._leaving: set[int] = set()
        """Micro-batches whose copies begin with their forward."""
        self._back: dict[int, Pending] = {}
        self._open: set[int] = set()
        self.version = 0
        self._clock = clock
        self._first = index == 0
        self._last = index == len(times.updates) - 1
        self._forward_ns = times.ops[OpKind.F, index]
        self._weight_ns = times.ops.get((OpKind.W, index))
        self._backward_ns = times.ops[OpKind.B if self._weight_ns is None else OpKind.I, index]
        self._update_ns = times.updates[index]

    @property
    def in_flight(self) -> int:
        """See `StageRunner`."""
        return len(self._open)

    @property
    def weights(self) -> TimedStage:
        """What is updated: nothing but the clock."""
        return self

    def forward(
        self, microbatch: int, inputs: list[Tensor], target: Callable[[int], Any]
    ) -> list[Tensor]:
        """See `StageRunner`: one empty tensor, or the last stage's loss."""
        self._open.add(microbatch)
        if microbatch >= self._read_from:
            self._clock.until(self._made)
        if microbatch in self._leaving:
            self._leaving.remove(microbatch)
            self.offload(microbatch)
        self._clock.until(self._clock.now() + self._forward_ns)
        return [torch.zeros(() if self._last else 0)]

    def backward(self, microbatch: int, gradients: list[Tensor]) -> list[Tensor]:
        """See `StageRunner`."""
        if self._weight_ns is None:
            self._open.remove(microbatch)
        if microbatch in self._back:
            self._back.pop(microbatch).wait()
        self._clock.until(self._clock.now() + self._backward_ns)
        return [] if self._first else [torch.zeros(0)]

    def weight_backward(self, microbatch: int) -> None:
        """See `StageRunner`."""
        assert self._weight_ns is not None
        self._open.remove(microbatch)
        self._clock.until(self._clock.now() + self._weight_ns)

    def offload(self, microbatch: int) -> None:
        """See `StageRunner`."""
        if microbatch not in self._open:
            self._leaving.add(microbatch)
            return
        self._out[microbatch] = self._ways.start(OpKind.OFFLOAD, self._index, microbatch)

    def free(self, microbatch: int) -> None:
        """See `StageRunner`."""
        self._out.pop(microbatch).wait()

    def prefetch(self, microbatch: int) -> None:
        """See `StageRunner`."""
        self._back[microbatch] = self._ways.start(OpKind.PREFETCH, self._index, microbatch)

    def update(self, step: int) -> None:
        """See `Weights`; what the host does behind it is waited for by the next, or a forward."""
        self._clock.until(self._made)
        self._clock.until(self._clock.now() + self._update_ns)
        self.version = step + 1
        if self._behind_ns:
            self._made = self._updates.behind(self._clock.now(), self._behind_ns)
            self._read_from = (step + 2) * self._microbatches


@dataclass(frozen=True, slots=True)
class _NoData:
    """Every micro-batch is empty."""

    def input(self, microbatch: int) -> list[Tensor]:
        """See `Feed`."""
        return []

    def fed(self, microbatch: int, places: Sequence[int]) -> list[Tensor]:
        """See `Feed`."""
        return []

    def target(self, microbatch: int) -> Tensor:
        """See `Feed`."""
        return torch.zeros(())


@dataclass(frozen=True, slots=True)
class DryRun:
    """One rank of a run without a model."""

    plan: Plan
    pattern: Pattern
    steps: int
    observer: Observer
    clock: RankClock
    times: PlannedTimes
    recorder: FlightRecorder

    def run(self, transport: Transport) -> None:
        """Walk this rank's list from empty to empty.

        Raises:
            RankError: if an action failed, as in a training.
        """
        ways = self._to_host(transport.rank)
        executor_of(
            self.plan,
            self.pattern,
            self._on_links(transport),
            self.clock,
            self.times,
            ways,
            self.observer,
            self.recorder,
        ).run(0, self.steps)

    def _on_links(self, transport: Transport) -> TimedTransport:
        crossings = {
            tag: _crossing(self.plan, self.times, *named)
            for tag, named in _tags(_endpoints(self.plan)).items()
        }
        total = self.steps * self.plan.microbatches
        return TimedTransport(transport, self.clock, crossings, self.plan, total)

    def _to_host(self, rank: int) -> HostLinks:
        if isinstance(self.clock, VirtualClock):
            total = self.steps * self.plan.microbatches
            return VirtualHostLinks(self.plan, rank, self.clock, total)
        return emulated_host_links(self.plan, self.clock, self.times)


def make_clock(kind: Kind) -> RankClock:
    """`sleep`: ops and links take their time, all ranks on one machine; `virtual`: none."""
    return VirtualClock() if kind == "virtual" else SleepClock()


def dry_run(
    plan: Plan,
    pattern: Pattern,
    steps: int,
    observer: Observer,
    clock: RankClock,
    *,
    times: PlannedTimes | None = None,
    memory: int = 256,
) -> DryRun:
    """What a rank runs `plan` dry with.

    Args:
        plan: a verified plan; stages, times and links come from it.
        pattern: the lowered plan.
        steps: optimizer steps.
        observer: is told backwards and updates, and a loss of 0.
        clock: this rank's.
        times: how long ops last if not as planned.
        memory: how many of the last actions the recorder keeps.
    """
    recorder = FlightRecorder(memory, clock.now)
    return DryRun(plan, pattern, steps, observer, clock, times or PlannedTimes.of(plan), recorder)


def emulated_host_links(plan: Plan, clock: RankClock, times: PlannedTimes) -> EmulatedHostLinks:
    """The way between a rank and its host, as the plan's cluster has it."""
    host = plan.cluster.host
    return EmulatedHostLinks(clock, times.ops, duplex=host is not None and host.duplex == "full")


def executor_of(
    plan: Plan,
    pattern: Pattern,
    transport: Transport,
    clock: RankClock,
    times: PlannedTimes,
    ways: HostLinks,
    observer: Observer,
    recorder: FlightRecorder,
) -> Executor:
    """What walks this rank's list, on stages that only pass time."""
    hosted, links = pattern.hosted[transport.rank], _endpoints(plan)
    updates = HostUpdates()
    return Executor(
        pattern,
        {index: TimedStage(times, index, clock, ways, updates) for index in hosted},
        {index: links[index] for index in hosted},
        _NoData(),
        transport,
        observer,
        NeverStop(),
        recorder,
    )


def _endpoints(plan: Plan) -> list[StageEndpoints]:
    boundaries = [(_NOTHING,)] * len(plan.chain.layers)
    return [endpoints(plan.stages, boundaries, index) for index in range(len(plan.stages))]


def _tags(links: list[StageEndpoints]) -> dict[int, tuple[OpKind, int]]:
    """Which transfer the messages of a tag are."""
    named: dict[int, tuple[OpKind, int]] = {}
    for stage, each in enumerate(links):
        for kind, endpoint in ((OpKind.SEND_F, each.output), (OpKind.SEND_B, each.input_gradient)):
            if endpoint is not None:
                named[endpoint.tags[0]] = (kind, stage)
    return named


def _crossing(plan: Plan, times: PlannedTimes, kind: OpKind, stage: int) -> Crossing:
    lasts = times.ops[kind, stage]
    ops = tuple(
        op.model_copy(update={"duration_ns": lasts})
        for op in plan.ops
        if (op.kind, op.stage) == (kind, stage)
    )
    ends = ops[0].link if ops else None
    if ends is None:
        raise InternalError(f"plan: no op {stage}{kind} on a link. Verify the plan first.")
    forward = kind is OpKind.SEND_F
    position = 2 * stage + 1 if forward else 2 * (2 * len(plan.stages) - 1 - stage)
    return Crossing(plan.cluster.links.resource(*ends), ops, position)
