"""A periodic schedule as the solver handles it: stages and absolute start times.

Micro-batch m = copy + k*j of an op starts at `times[op][copy] + j * period` (T4 with
time = shift * period + start). Absolute times keep precedence linear; `to_ops` splits them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

from pipeplan.ilp.costs import CostModel
from pipeplan.plan import Op, OpKind, Stage

OpId = tuple[OpKind, int]
"""(kind, stage)."""


@dataclass(frozen=True, slots=True)
class StageOffload:
    """What a stage sends to the host between its forward and its backward: (H1), (H2).

    Attributes:
        stage: Which one.
        runs: First and last layer of each run whose inside leaves.
        size: Bytes of a micro-batch that leave, o(s).
        ns: How long they take, each way.
        times: When OFFLOAD and PREFETCH start, of each copy that leaves.
        input: Whether the saved input of its first layer leaves as well.
    """

    stage: int
    runs: tuple[tuple[int, int], ...]
    size: int
    ns: int
    times: Mapping[int, tuple[int, int]]
    input: bool = False


@dataclass(frozen=True, slots=True)
class Schedule:
    """Stages, the period of k micro-batches in ns, when each op of micro-batches 0..k-1 starts.

    `offloads` says what stages offload to the host, in their order.
    """

    stages: tuple[Stage, ...]
    period: int
    k: int
    times: Mapping[OpId, tuple[int, ...]]
    offloads: tuple[StageOffload, ...] = ()

    @property
    def uses_host(self) -> bool:
        """Whether anything of it is in the host's memory."""
        return bool(self.offloads) or any(stage.states == "host" for stage in self.stages)

    @property
    def per_microbatch(self) -> Fraction:
        """Nanoseconds of the period that one micro-batch takes."""
        return Fraction(self.period, self.k)


def unrolled(schedule: Schedule, k: int) -> Schedule:
    """The same plan written with k micro-batches a period; k is a multiple of the schedule's."""
    repeats = k // schedule.k
    times = {
        op: tuple(time + repeat * schedule.period for repeat in range(repeats) for time in row)
        for op, row in schedule.times.items()
    }
    offloads = tuple(
        replace(
            each,
            times={
                copy + repeat * schedule.k: (
                    out + repeat * schedule.period,
                    back + repeat * schedule.period,
                )
                for repeat in range(repeats)
                for copy, (out, back) in each.times.items()
            },
        )
        for each in schedule.offloads
    )
    return Schedule(schedule.stages, schedule.period * repeats, k, times, offloads)


def whole_step(costs: CostModel, schedule: Schedule, microbatches: int) -> Schedule:
    """The step plan (T6) of a schedule without offloading: its first `microbatches`."""
    times = {
        op: [row[m % schedule.k] + m // schedule.k * schedule.period for m in range(microbatches)]
        for op, row in schedule.times.items()
    }
    begin = min(row[0] for row in times.values())
    end = max(row[-1] + duration(costs, schedule.stages, op) for op, row in times.items())
    moved = {op: tuple(time - begin for time in row) for op, row in times.items()}
    return Schedule(schedule.stages, max(1, end - begin), microbatches, moved)


def chain_ops(stages: tuple[Stage, ...]) -> list[OpId]:
    """The ops of one micro-batch in chain order, sends only where the GPU changes (§1)."""

    def crosses(stage: int) -> bool:
        return 0 <= stage < len(stages) - 1 and stages[stage].gpu != stages[stage + 1].gpu

    ops: list[OpId] = []
    for stage in range(len(stages)):
        ops.append((OpKind.F, stage))
        if crosses(stage):
            ops.append((OpKind.SEND_F, stage))
    for stage in reversed(range(len(stages))):
        ops.append((stages[stage].backward, stage))
        if crosses(stage - 1):
            ops.append((OpKind.SEND_B, stage))
    return ops


def weight_ops(stages: tuple[Stage, ...]) -> list[OpId]:
    """W of each stage whose backward is split: behind its I, outside of the chain order."""
    return [(OpKind.W, stage.id) for stage in stages if stage.split_backward]


def duration(costs: CostModel, stages: tuple[Stage, ...], op: OpId) -> int:
    """(T2), (T3) of one op in ns."""
    kind, index = op
    stage = stages[index]
    if kind is OpKind.F and stage.split_backward:
        return costs.split_forward_ns(stage.first, stage.last, stage.gpu)
    if kind is OpKind.F:
        return costs.forward_ns(stage.first, stage.last, stage.gpu)
    if kind is OpKind.B:
        return costs.backward_ns(stage.first, stage.last, stage.gpu)
    if kind is OpKind.I:
        return costs.input_backward_ns(stage.first, stage.last, stage.gpu)
    if kind is OpKind.W:
        return costs.weight_backward_ns(stage.first, stage.last, stage.gpu)
    if kind is OpKind.SEND_F:
        return costs.send_forward_ns(stage.last, stage.gpu, stages[index + 1].gpu)
    return costs.send_backward_ns(stage.first - 1, stage.gpu, stages[index - 1].gpu)


def link_of(stages: tuple[Stage, ...], op: OpId) -> tuple[int, int]:
    """(sender GPU, receiver GPU) of a send."""
    kind, index = op
    other = index + 1 if kind is OpKind.SEND_F else index - 1
    return stages[index].gpu, stages[other].gpu


def resource(costs: CostModel, stages: tuple[Stage, ...], op: OpId) -> tuple[int, ...]:
    """What the op excludes others on: (gpu,) or the link's pair (R3), (R4)."""
    if op[0].is_compute:
        return (stages[op[1]].gpu,)
    return costs.cluster.links.resource(*link_of(stages, op))


def position(stages: tuple[Stage, ...], op: OpId) -> int:
    """(T1), (H5), (S1)."""
    kind, index = op
    if kind is OpKind.W:
        return 6 * len(stages) + index
    if kind.is_host:
        return 4 * len(stages) + 2 * index + (kind is OpKind.PREFETCH)
    last = len(stages) - 1
    base = 2 * index if kind in (OpKind.F, OpKind.SEND_F) else 2 * last + 1 + 2 * (last - index)
    return base + (not kind.is_compute)


def overlap(period: int, intervals: list[tuple[int, int]]) -> int:
    """Largest number of half-open intervals alive at once, each repeated with the period."""
    events = sorted(
        [(begin % period, 1) for begin, _ in intervals]
        + [(end % period, -1) for _, end in intervals]
    )
    level = best = sum(end // period - begin // period for begin, end in intervals)
    for _, change in events:
        level += change
        best = max(best, level)
    return best


def to_ops(costs: CostModel, schedule: Schedule) -> tuple[Op, ...]:
    """The plan's ops in normal form (R1): starts in [0, period), smallest shift 0."""
    stages, period = schedule.stages, schedule.period
    origin = min(min(times) for times in schedule.times.values()) // period
    return tuple(
        Op(
            kind=op[0],
            stage=op[1],
            copy_=copy,
            gpu=None if op[0].is_send else stages[op[1]].gpu,
            link=link_of(stages, op) if op[0].is_send else None,
            start_ns=time % period,
            duration_ns=length,
            shift=time // period - origin,
        )
        for copy in range(schedule.k)
        for op, time, length in _timed(costs, schedule, copy)
    )


def _timed(costs: CostModel, schedule: Schedule, copy: int) -> Iterator[tuple[OpId, int, int]]:
    """(op, absolute start, duration) of one micro-batch, those of the host last."""
    for op in [*chain_ops(schedule.stages), *weight_ops(schedule.stages)]:
        yield op, schedule.times[op][copy], duration(costs, schedule.stages, op)
    for each in schedule.offloads:
        if copy in each.times:
            out, back = each.times[copy]
            yield (OpKind.OFFLOAD, each.stage), out, each.ns
            yield (OpKind.PREFETCH, each.stage), back, each.ns
