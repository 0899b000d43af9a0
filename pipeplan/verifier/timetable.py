"""When each op of a structurally sound plan happens: (T1) positions and (T4) times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from pipeplan.plan import Op, OpKind, Plan
from pipeplan.verifier.structure import chain_order

_HOST = (OpKind.OFFLOAD, OpKind.PREFETCH)


@dataclass(frozen=True)
class TimedOp:
    """One op of micro-batch `copy`, in period 0: `start` is (T4) with j = 0, in ns."""

    kind: OpKind
    stage: int
    copy: int
    start: int
    duration: int
    position: int
    """(T1), (H5), (S1)."""

    @property
    def end(self) -> int:
        """When it is over."""
        return self.start + self.duration

    @property
    def label(self) -> str:
        """`2F0`: stage, kind, copy."""
        return f"{self.stage}{self.kind}{self.copy}"


class Timetable:
    """The ops of a plan by kind, stage and copy. Needs sound stages and ops."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.period = plan.period_ns
        self._ops = {(op.kind, op.stage, op.copy_): self._timed(op) for op in plan.ops}

    def _timed(self, op: Op) -> TimedOp:
        return TimedOp(
            kind=op.kind,
            stage=op.stage,
            copy=op.copy_,
            start=op.shift * self.plan.period_ns + op.start_ns,
            duration=op.duration_ns,
            position=position(op.kind, op.stage, len(self.plan.stages)),
        )

    def __getitem__(self, key: tuple[OpKind, int, int]) -> TimedOp:
        return self._ops[key]

    def backward(self, stage: int, copy: int) -> TimedOp:
        """B of a stage, or I where it is split."""
        return self._ops[self.plan.stages[stage].backward, stage, copy]

    @cached_property
    def order(self) -> tuple[tuple[OpKind, int], ...]:
        """(kind, stage) of one micro-batch's ops in chain order, without those of (H2) and W."""
        return chain_order(self.plan)

    @cached_property
    def offloaded(self) -> dict[int, tuple[int, ...]]:
        """Copies that have OFFLOAD and PREFETCH (H2), in order, by stage; no stage without any."""
        copies = range(self.plan.k)
        found = {
            stage.id: tuple(c for c in copies if (OpKind.OFFLOAD, stage.id, c) in self._ops)
            for stage in self.plan.stages
        }
        return {stage: having for stage, having in found.items() if having}

    @cached_property
    def split(self) -> tuple[int, ...]:
        """The stages that have W, in order."""
        return tuple(stage.id for stage in self.plan.stages if stage.split_backward)

    @property
    def kinds(self) -> Iterator[tuple[OpKind, int, tuple[int, ...]]]:
        """(kind, stage, copies that have it) of every op, those of (H2) last."""
        every = tuple(range(self.plan.k))
        yield from ((kind, stage, every) for kind, stage in self.order)
        yield from ((OpKind.W, stage, every) for stage in self.split)
        for stage, having in self.offloaded.items():
            yield from ((kind, stage, having) for kind in _HOST)

    @property
    def all(self) -> tuple[TimedOp, ...]:
        """Every op of every copy, in the plan's order."""
        return tuple(self._ops.values())

    def gpu(self, op: TimedOp) -> int:
        """Of a compute op and on the way to the host its GPU, of a SEND the one that it leaves."""
        return self.plan.stages[op.stage].gpu

    def place(self, time: int) -> str:
        """`time` for people: its place in the period and how many periods after copy 0's."""
        shift, start = divmod(time, self.period)
        return f"{start} ns of the period" + (f" (shift {shift})" if shift else "")


def position(kind: OpKind, stage: int, stages: int) -> int:
    """(T1), (H5), (S1): the place of an op among all of a micro-batch, absent ones counted."""
    if kind.is_host:
        return 4 * stages + 2 * stage + (kind is OpKind.PREFETCH)
    if kind is OpKind.W:
        return 6 * stages + stage
    if kind is OpKind.F:
        return 2 * stage
    if kind is OpKind.SEND_F:
        return 2 * stage + 1
    backward = 2 * stages - 1 + 2 * (stages - 1 - stage)
    return backward + 1 if kind is OpKind.SEND_B else backward
