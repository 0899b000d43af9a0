"""What a schedule does to every GPU's bytes: (M2)-(M6), (P2)-(P5), (H6), (H7).

A change happens at a key (time, class, micro-batch, position, sub) of (O5), in absolute time, for
micro-batches 0..k-1.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.schedule import (
    OpId,
    Schedule,
    StageOffload,
    duration,
    link_of,
    overlap,
    position,
)
from pipeplan.ilp.segment_bytes import SegmentBytes
from pipeplan.plan import OpKind, Stage

SAVED, WORKING, DIRECT, MESSAGE = range(4)
# classes of (O5)
_END, _RECV, _INSTANT, _OPT, _START = range(5)


class MemoryEvent(NamedTuple):
    """`size` bytes of one term at one key; `counted` tells whether peaks are taken there."""

    gpu: int
    time: int
    order: int
    microbatch: int
    position: int
    sub: int
    term: int
    size: int
    counted: bool = True


@dataclass
class MemoryEvents:
    """What both accountings share: the schedule and its segments."""

    costs: CostModel
    schedule: Schedule
    _lengths: dict[OpId, int] = field(default_factory=dict)
    """What was asked for: every op comes back for each of the k micro-batches."""
    _places: dict[OpId, int] = field(default_factory=dict)

    def segment(self, stage: int) -> SegmentBytes:
        """Bytes of a stage, its predecessor's shared output taken into account."""
        return self._segments[stage]

    @cached_property
    def _segments(self) -> list[SegmentBytes]:
        stages = self.schedule.stages
        return [stage_bytes(self.costs, stages, stage.id) for stage in stages]

    def length(self, op: OpId) -> int:
        """(T2), (T3) of an op in ns."""
        if op not in self._lengths:
            self._lengths[op] = duration(self.costs, self.schedule.stages, op)
        return self._lengths[op]

    def place(self, op: OpId) -> int:
        """(T1), (H5) of an op."""
        if op not in self._places:
            self._places[op] = position(self.schedule.stages, op)
        return self._places[op]

    def products(self) -> Iterator[tuple[OpId, OpId, int, bool]]:
        """(producer, consumer, boundary layer, backward?) of each tensor between two stages."""
        for stage in self.schedule.stages[1:]:
            yield (OpKind.F, stage.id - 1), (OpKind.F, stage.id), stage.first - 1, False
            before = self.schedule.stages[stage.id - 1]
            yield (stage.backward, stage.id), (before.backward, before.id), stage.first - 1, True

    def same_gpu(self, one: OpId, other: OpId) -> bool:
        """Whether both compute ops run on one GPU."""
        return self.schedule.stages[one[1]].gpu == self.schedule.stages[other[1]].gpu

    def event(
        self,
        op: OpId,
        copy: int,
        time: int,
        order: int,
        sub: int,
        term: int,
        size: int,
        *,
        gpu: int | None = None,
        counted: bool = True,
    ) -> MemoryEvent:
        """A change at `time` of micro-batch `copy`, ordered as an event of `op`."""
        where = self.schedule.stages[op[1]].gpu if gpu is None else gpu
        return MemoryEvent(where, time, order, copy, self.place(op), sub, term, size, counted)

    def start(self, op: OpId, copy: int, term: int, size: int) -> MemoryEvent:
        """A change when compute op `op` starts; peaks are taken there."""
        time, order = self.schedule.times[op][copy], _START if self.length(op) else _INSTANT
        return self.event(op, copy, time, order, 0, term, size)

    def end(self, op: OpId, copy: int, term: int, size: int) -> MemoryEvent:
        """A change when compute op `op` ends."""
        length = self.length(op)
        time = self.schedule.times[op][copy] + length
        order = _END if length else _INSTANT
        return self.event(op, copy, time, order, 1, term, size, counted=self.costs.exact)

    def update(self, op: OpId, copy: int, term: int, size: int, sub: int = 0) -> MemoryEvent:
        """A change at the optimizer step that may follow backward `op`."""
        time = self.schedule.times[op][copy] + self.length(op)
        return self.event(op, copy, time, _OPT, sub, term, size)

    def issues(self) -> Iterator[MemoryEvent]:
        """Instants that change no bytes, but may be the first at which a GPU's peak is seen."""
        return iter(())

    def permanent(self, gpu: int) -> int:
        """Message bytes that a GPU holds all the time."""
        return 0


class ExactMemoryEvents(MemoryEvents):
    """(M2)-(M6), (H6), (H7)."""

    def events(self) -> Iterator[MemoryEvent]:
        """Every change of every GPU, for micro-batches 0..k-1."""
        for copy in range(self.schedule.k):
            for stage in self.schedule.stages:
                yield from self._compute(stage, copy)
            for producer, consumer, boundary, backward in self.products():
                sent = self.costs.unsaved_bytes(boundary, backward=backward)
                if self.same_gpu(producer, consumer):
                    yield self.end(producer, copy, DIRECT, sent)
                    yield self.start(consumer, copy, DIRECT, -sent)
                    continue
                received = self.costs.tensor_bytes(boundary, backward=backward)
                send = (OpKind.SEND_B if backward else OpKind.SEND_F, producer[1])
                yield self.end(producer, copy, MESSAGE, sent)
                yield from self._transfer(send, copy, sent, received)
                yield self.start(consumer, copy, MESSAGE, -received)
        for offload in self.schedule.offloads:
            yield from self.offload_events(offload)

    def issues(self) -> Iterator[MemoryEvent]:
        """SEND and OFFLOAD, (O2) and (H5): what was carried over from the last period is seen."""
        stages = self.schedule.stages
        for op, times in self.schedule.times.items():
            if op[0].is_send:
                source, _ = link_of(stages, op)
                for copy, time in enumerate(times):
                    issue = defer(self._busy[source], self.schedule.period, time)
                    yield self.event(op, copy, issue, _INSTANT, 0, MESSAGE, 0)
        for each in self.schedule.offloads:
            for copy, (leaves, _) in each.times.items():
                issue, out = self.deferred(each.stage, leaves), (OpKind.OFFLOAD, each.stage)
                yield self.event(out, copy, issue, _INSTANT, 0, SAVED, 0)

    def offload_events(self, offload: StageOffload) -> Iterator[MemoryEvent]:
        """(H6): what has left, and no forward uses, does not count until it is posted back."""
        out, back = (OpKind.OFFLOAD, offload.stage), (OpKind.PREFETCH, offload.stage)
        forward = OpKind.F, offload.stage
        for copy, (leaves, returns) in offload.times.items():
            used = self.schedule.times[forward][copy] + self.length(forward)
            left, post = max(leaves + offload.ns, used), self.deferred(offload.stage, returns)
            yield self.event(out, copy, left, _END, 0, SAVED, -offload.size)
            yield self.event(back, copy, post, _RECV, 0, SAVED, offload.size)

    def host_events(self, offload: StageOffload) -> Iterator[MemoryEvent]:
        """(H7): bytes in the host's memory, from the issue of OFFLOAD to the start of B."""
        for copy, (leaves, _) in offload.times.items():
            issue, out = self.deferred(offload.stage, leaves), (OpKind.OFFLOAD, offload.stage)
            yield self.event(out, copy, issue, _INSTANT, 0, SAVED, offload.size)
            backward = self.schedule.stages[offload.stage].backward
            yield self.start((backward, offload.stage), copy, SAVED, -offload.size)

    def deferred(self, stage: int, time: int) -> int:
        """(O1) on the GPU of a stage."""
        busy = self._busy[self.schedule.stages[stage].gpu]
        return defer(busy, self.schedule.period, time)

    def _compute(self, stage: Stage, copy: int) -> Iterator[MemoryEvent]:
        size = self.segment(stage.id)
        forward, backward = (OpKind.F, stage.id), (stage.backward, stage.id)
        beyond = size.input_backward if stage.split_backward else size.backward
        yield self.start(forward, copy, SAVED, size.saved)
        yield self.start(forward, copy, WORKING, size.running - size.saved)
        yield self.end(forward, copy, WORKING, size.saved - size.running)
        yield self.start(backward, copy, WORKING, beyond)
        yield self.end(backward, copy, WORKING, -beyond)
        yield self.end(backward, copy, SAVED, -size.saved)
        if stage.split_backward:
            yield from self._weight(stage, copy)
        if self.costs.semantics == "2bw" and size.optimizer:
            yield self.update(backward, copy, WORKING, size.optimizer)
            yield self.update(backward, copy, WORKING, -size.optimizer, sub=1)

    def _weight(self, stage: Stage, copy: int) -> Iterator[MemoryEvent]:
        """(S3), (S5): what W needs, without what the stage before still counts."""
        size, inputs, weights = self.segment(stage.id), (OpKind.I, stage.id), (OpKind.W, stage.id)
        yield self.end(inputs, copy, SAVED, size.weight)
        yield self.start(weights, copy, WORKING, size.weight_backward)
        yield self.end(weights, copy, WORKING, -size.weight_backward)
        yield self.end(weights, copy, SAVED, -size.weight)
        if size.weight_shared:
            before = self.schedule.stages[stage.id - 1]
            released = self.start((before.backward, before.id), copy, SAVED, size.weight_shared)
            over = self.end(weights, copy, SAVED, size.weight_shared)
            yield self.end(inputs, copy, SAVED, -size.weight_shared)
            yield min(released, over, key=lambda event: event[1:6])

    def _transfer(self, send: OpId, copy: int, sent: int, received: int) -> Iterator[MemoryEvent]:
        """(O1)-(O4): the receive's bytes from its posting, the sent bytes until they have left."""
        source, target = link_of(self.schedule.stages, send)
        length, time = self.length(send), self.schedule.times[send][copy]
        issue = defer(self._busy[source], self.schedule.period, time)
        post = defer(self._busy[target], self.schedule.period, issue)
        yield self.event(send, copy, post, _RECV, 0, MESSAGE, received, gpu=target)
        order = _END if length else _INSTANT
        yield self.event(send, copy, time + length, order, 2, MESSAGE, -sent)

    @cached_property
    def _busy(self) -> list[list[tuple[int, int]]]:
        """By GPU: sorted (start modulo the period, duration) of its compute ops."""
        schedule = self.schedule
        busy: list[list[tuple[int, int]]] = [[] for _ in range(self.costs.gpus)]
        for op, times in schedule.times.items():
            if op[0].is_compute:
                length = self.length(op)
                own = busy[schedule.stages[op[1]].gpu]
                own += [(time % schedule.period, length) for time in times]
        return [sorted(own) for own in busy]


class PaperMemoryEvents(MemoryEvents):
    """(P2)-(P5); peaks are taken at the starts of compute ops only."""

    def events(self) -> Iterator[MemoryEvent]:
        """Every change of every GPU, for micro-batches 0..k-1."""
        for copy in range(self.schedule.k):
            for stage in self.schedule.stages:
                size = self.segment(stage.id)
                forward, backward = (OpKind.F, stage.id), (OpKind.B, stage.id)
                yield self.start(forward, copy, WORKING, size.forward)
                yield self.end(forward, copy, WORKING, -size.forward)
                yield self.end(forward, copy, SAVED, size.saved)
                yield self.start(backward, copy, WORKING, size.backward)
                yield self.end(backward, copy, WORKING, -size.backward)
                yield self.end(backward, copy, SAVED, -size.saved)
            for producer, consumer, boundary, backward_ in self.products():
                if not self.same_gpu(producer, consumer):
                    continue
                size_bytes = self.costs.unsaved_bytes(boundary, backward=backward_)
                yield self.end(producer, copy, DIRECT, size_bytes)
                yield self.start(consumer, copy, DIRECT, -size_bytes)

    def permanent(self, gpu: int) -> int:
        """(P5): slots of every tensor of every cut that touches the GPU."""
        total = 0
        stages, times = self.schedule.stages, self.schedule.times
        for producer, consumer, boundary, backward in self.products():
            if self.same_gpu(producer, consumer):
                continue
            send = (OpKind.SEND_B if backward else OpKind.SEND_F, producer[1])
            made, length = self.length(producer), self.length(send)
            ends = [time + made for time in times[producer]]
            left = [time + length for time in times[send]]
            sides = {
                stages[producer[1]].gpu: zip(ends, left, strict=True),
                stages[consumer[1]].gpu: zip(times[send], times[consumer], strict=True),
            }
            if gpu in sides:
                slots = max(1, overlap(self.schedule.period, list(sides[gpu])))
                total += slots * self.costs.tensor_bytes(boundary, backward=backward)
        return total


def stage_bytes(costs: CostModel, stages: tuple[Stage, ...], stage: int) -> SegmentBytes:
    """Bytes of a stage, knowing whether its predecessor is on the same GPU (u of M2)."""
    this = stages[stage]
    covered = stage > 0 and stages[stage - 1].gpu == this.gpu
    return costs.segment(this.first, this.last, covered, this.states)


def defer(busy: list[tuple[int, int]], period: int, time: int) -> int:
    """(O1): the start of the compute op that runs strictly around `time`, else `time`."""
    if not busy:
        return time
    base, offset = time - time % period, time % period
    index = bisect_left(busy, (offset, -1)) - 1
    for start, length in _previous(busy, index):
        began = base + start if start < offset else base + start - period
        if length:
            return began if began < time < began + length else time
    return time


def _previous(busy: list[tuple[int, int]], index: int) -> Iterator[tuple[int, int]]:
    """The ops from `index` backwards around the period, each once."""
    for step in range(len(busy)):
        yield busy[(index - step) % len(busy)]
