"""The solver's own count of a schedule's bytes: (M1)-(M6) and (P1)-(P5), exact.

Each byte that comes or goes is a change at a key of (O5). Modulo the period a change at key
(time, class, micro-batch, position) of quotient q = time div period acts q periods later, so the
level before the first event of a period is -sum(q * change); sorting the keys gives the rest.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pipeplan.ilp.costs import Costs, SegmentBytes
from pipeplan.ilp.schedule import OpId, Schedule, duration, link_of, overlap, position
from pipeplan.plan import MemoryRow, OpKind, Stage

SAVED, WORKING, DIRECT, MESSAGE = range(4)
# classes of (O5)
_END, _RECV, _INSTANT, _OPT, _START = range(5)


class _Change(NamedTuple):
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


def memory_rows(costs: Costs, schedule: Schedule) -> tuple[MemoryRow, ...]:
    """One row per GPU, at the first instant of its largest total.

    Args:
        costs: Durations and bytes of the chain on the cluster.
        schedule: A schedule that keeps (R2)-(R5).
    """
    sweep = _ExactSweep(costs, schedule) if costs.exact else _PaperSweep(costs, schedule)
    changes: list[list[_Change]] = [[] for _ in range(costs.gpus)]
    for change in sweep.changes():
        changes[change.gpu].append(change)
    return tuple(_row(costs, schedule, gpu, changes[gpu], sweep) for gpu in range(costs.gpus))


def fits(rows: Iterable[MemoryRow]) -> bool:
    """Whether no GPU's peak exceeds its memory."""
    return all(row.peak_bytes <= row.budget_bytes for row in rows)


@dataclass
class _Sweep:
    """What both accountings share: the schedule and its segments."""

    costs: Costs
    schedule: Schedule

    def segment(self, stage: int) -> SegmentBytes:
        """Bytes of a stage, its predecessor's shared output taken into account."""
        return stage_bytes(self.costs, self.schedule.stages, stage)

    def products(self) -> Iterator[tuple[OpId, OpId, int, bool]]:
        """(producer, consumer, boundary layer, backward?) of each tensor between two stages."""
        for stage in self.schedule.stages[1:]:
            yield (OpKind.F, stage.id - 1), (OpKind.F, stage.id), stage.first - 1, False
            yield (OpKind.B, stage.id), (OpKind.B, stage.id - 1), stage.first - 1, True

    def same_gpu(self, one: OpId, other: OpId) -> bool:
        """Whether both compute ops run on one GPU."""
        return self.schedule.stages[one[1]].gpu == self.schedule.stages[other[1]].gpu

    def change(
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
    ) -> _Change:
        """A change at `time` of micro-batch `copy`, ordered as an event of `op`."""
        stages = self.schedule.stages
        where = stages[op[1]].gpu if gpu is None else gpu
        place = position(stages, op)
        return _Change(where, time, order, copy, place, sub, term, size, counted)

    def start(self, op: OpId, copy: int, term: int, size: int) -> _Change:
        """A change when compute op `op` starts; peaks are taken there."""
        long = duration(self.costs, self.schedule.stages, op) > 0
        time = self.schedule.times[op][copy]
        return self.change(op, copy, time, _START if long else _INSTANT, 0, term, size)

    def end(self, op: OpId, copy: int, term: int, size: int) -> _Change:
        """A change when compute op `op` ends."""
        length = duration(self.costs, self.schedule.stages, op)
        time = self.schedule.times[op][copy] + length
        order = _END if length else _INSTANT
        return self.change(op, copy, time, order, 1, term, size, counted=self.costs.exact)

    def permanent(self, gpu: int) -> int:
        """Message bytes that a GPU holds all the time."""
        return 0


class _ExactSweep(_Sweep):
    """(M2)-(M6)."""

    def changes(self) -> Iterator[_Change]:
        """Every change of every GPU, for micro-batches 0..k-1."""
        busy = [self._busy(gpu) for gpu in range(self.costs.gpus)]
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
                yield from self._transfer(send, copy, sent, received, busy)
                yield self.start(consumer, copy, MESSAGE, -received)

    def _compute(self, stage: Stage, copy: int) -> Iterator[_Change]:
        size = self.segment(stage.id)
        forward, backward = (OpKind.F, stage.id), (OpKind.B, stage.id)
        yield self.start(forward, copy, SAVED, size.saved)
        yield self.start(forward, copy, WORKING, size.forward - size.saved)
        yield self.end(forward, copy, WORKING, size.saved - size.forward)
        yield self.start(backward, copy, WORKING, size.backward)
        yield self.end(backward, copy, WORKING, -size.backward)
        yield self.end(backward, copy, SAVED, -size.saved)
        if self.costs.semantics == "2bw" and size.optimizer:
            time = self.schedule.times[backward][copy]
            time += duration(self.costs, self.schedule.stages, backward)
            for sub, sign in ((0, 1), (1, -1)):
                yield self.change(backward, copy, time, _OPT, sub, WORKING, sign * size.optimizer)

    def _transfer(
        self, send: OpId, copy: int, sent: int, received: int, busy: list[list[tuple[int, int]]]
    ) -> Iterator[_Change]:
        """(O1)-(O4): the receive's bytes from its posting, the sent bytes until they have left."""
        source, target = link_of(self.schedule.stages, send)
        length = duration(self.costs, self.schedule.stages, send)
        time = self.schedule.times[send][copy]
        issue = _hold(busy[source], self.schedule.period, time)
        post = _hold(busy[target], self.schedule.period, issue)
        yield self.change(send, copy, post, _RECV, 0, MESSAGE, received, gpu=target)
        order = _END if length else _INSTANT
        yield self.change(send, copy, time + length, order, 2, MESSAGE, -sent)

    def _busy(self, gpu: int) -> list[tuple[int, int]]:
        """Sorted (start modulo the period, duration) of the GPU's compute ops."""
        schedule = self.schedule
        return sorted(
            (time % schedule.period, duration(self.costs, schedule.stages, op))
            for op, times in schedule.times.items()
            if op[0].is_compute and schedule.stages[op[1]].gpu == gpu
            for time in times
        )


class _PaperSweep(_Sweep):
    """(P2)-(P5); peaks are taken at the starts of compute ops only."""

    def changes(self) -> Iterator[_Change]:
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
            made, length = (
                duration(self.costs, stages, producer),
                duration(self.costs, stages, send),
            )
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


def in_flight(costs: Costs, schedule: Schedule) -> tuple[int, ...]:
    """Largest number of micro-batches at once between start of F and end of B, by stage (§2)."""
    sweep = _Sweep(costs, schedule)
    counts = []
    for stage in schedule.stages:
        changes = [
            change
            for copy in range(schedule.k)
            for change in (
                sweep.start((OpKind.F, stage.id), copy, SAVED, 1),
                sweep.end((OpKind.B, stage.id), copy, SAVED, -1),
            )
        ]
        counts.append(_peak_terms(schedule, changes)[SAVED])
    return tuple(counts)


def stage_bytes(costs: Costs, stages: tuple[Stage, ...], stage: int) -> SegmentBytes:
    """Bytes of a stage, knowing whether its predecessor is on the same GPU (u of M2)."""
    this = stages[stage]
    covered = stage > 0 and stages[stage - 1].gpu == this.gpu
    return costs.segment(this.first, this.last, covered)


def _hold(busy: list[tuple[int, int]], period: int, time: int) -> int:
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


def _row(
    costs: Costs, schedule: Schedule, gpu: int, changes: list[_Change], sweep: _Sweep
) -> MemoryRow:
    hosted = [stage.id for stage in schedule.stages if stage.gpu == gpu]
    sizes = [sweep.segment(stage) for stage in hosted]
    states = sum(size.states for size in sizes)
    terms = _peak_terms(schedule, changes) if hosted else [0, 0, 0, 0]
    terms[MESSAGE] += sweep.permanent(gpu)
    if costs.exact and costs.semantics == "flush" and hosted:
        update = max(size.optimizer for size in sizes)
        if update > sum(terms):
            terms = [0, update, 0, 0]
    return MemoryRow(
        gpu=gpu,
        states_bytes=states,
        saved_bytes=terms[SAVED],
        working_bytes=terms[WORKING],
        direct_bytes=terms[DIRECT],
        message_bytes=terms[MESSAGE],
        peak_bytes=states + sum(terms),
        budget_bytes=costs.budgets[gpu],
    )


def _peak_terms(schedule: Schedule, changes: list[_Change]) -> list[int]:
    """The four terms after the first counted event that reaches the largest sum."""
    period, k = schedule.period, schedule.k
    level = [0, 0, 0, 0]
    keyed: dict[tuple[int, int, int, int, int], list[_Change]] = {}
    for change in changes:
        quotient, offset = divmod(change.time, period)
        level[change.term] -= quotient * change.size
        key = (offset, change.order, change.microbatch - quotient * k, change.position, change.sub)
        keyed.setdefault(key, []).append(change)
    best, total = [0, 0, 0, 0], -1
    for key in sorted(keyed):
        for change in keyed[key]:
            level[change.term] += change.size
        if any(change.counted for change in keyed[key]) and sum(level) > total:
            best, total = level.copy(), sum(level)
    return best
