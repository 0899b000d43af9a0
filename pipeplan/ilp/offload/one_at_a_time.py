"""A GPU with one micro-batch at a time: the per-device planner decides what leaves, and when.

What a stage offloads is there until its forward is over, so in one stage a micro-batch saves
nothing. Cut into small stages it does: the first ones are away while the last ones run. Which ones
leave, in which order, and what waits for them is decided by `pipeplan.remat`, whose units are
stages here ((O1)-(O6) of docs/reference/remat-rules.md). Between its forwards and its backwards
the GPU may have to wait for those behind it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.offload.byte_options import (
    Sent,
    byte_options,
    leaves_early,
    own_input_bytes,
)
from pipeplan.ilp.schedule import OpId, Schedule, StageOffload
from pipeplan.ilp.segment_bytes import SegmentBytes
from pipeplan.plan import OpKind, Stage
from pipeplan.remat.late_acceptance import GoOn, always
from pipeplan.remat.methods import local_search
from pipeplan.remat.offloading.compute_order import ComputeOrder, OffloadUnit
from pipeplan.remat.offloading.no_wait import NoWaitSchedule, no_wait_in_order
from pipeplan.remat.schedules.host_link import HostLink, Lanes, Transfer
from pipeplan.remat.schedules.schedule import DeviceOp, DeviceOpKind, DeviceSchedule

Segment = tuple[int, int]
GRAINS = (1, 2, 4, 8)
"""Layers of a stage: the fewer, the sooner something leaves; tensors between stages stay."""
SLOTS = 100
"""Of the dynamic program that chooses what leaves."""
F, B = DeviceOpKind.KEEP_ALL, DeviceOpKind.BACKWARD
OUT, BACK = DeviceOpKind.OFFLOAD, DeviceOpKind.PREFETCH


class Sends(Enum):
    """What of a stage leaves, where it leaves."""

    INPUT = "what is saved of its input"
    INSIDE = "runs of its layers"
    BOTH = "both"


STARTS = (Sends.INSIDE, Sends.BOTH, Sends.INPUT)
"""What all stages send at first, of equally short ones the first: terms of memory are less exact
where tensors ride along in inputs that leave, (M9) of docs/reference/model.md."""


@dataclass(frozen=True)
class DeviceShare:
    """What one GPU does for each micro-batch, and the bytes it has for that.

    Attributes:
        layers: first and last.
        gpu: which GPU.
        room: bytes, those of states among them.
        gap_ns: from the last forward to the first backward, at least.
    """

    layers: Segment
    gpu: int
    room: int
    gap_ns: int = 0


class OneAtATime:
    """What leaves one GPU and when: found at once, and improved while there is time."""

    def __init__(self, costs: CostModel, share: DeviceShare, *, quick: bool = False) -> None:
        """The best of all grains, where all stages send the same, without local search.

        Args:
            costs: with a host, under the exact memory model.
            share: that of the GPU.
            quick: whether only the finest grain is looked at, where stages send both.
        """
        host = costs.cluster.host
        assert host is not None
        link = HostLink(host.bandwidth_bytes_per_s, host.duplex == "full", between=True)

        def best(sends: Sends) -> _Choice:
            every = (cut(share.layers, grain) for grain in (GRAINS[:1] if quick else GRAINS))
            alike = (
                _Stages(costs, share, each, link, (sends,) * len(each)).chosen() for each in every
            )
            return min(alike, key=_Choice.length)

        self._choices = [best(sends) for sends in ((Sends.BOTH,) if quick else STARTS)]

    def choose(self, go_on: GoOn) -> None:
        """Of each stage by itself what it sends, while `go_on` says.

        Hill climbing, from all that send the same, as long as a change of one stage makes it
        shorter.
        """
        self._choices = [each.climbed(go_on) for each in self._shortest_first()]

    def improve(self, go_on: GoOn) -> None:
        """Local search over what leaves and in which order, as long as `go_on` says."""
        self._choices = [each.searched(go_on) for each in self._shortest_first()]

    def _shortest_first(self) -> list[_Choice]:
        return sorted(self._choices, key=_Choice.length)

    def schedules(self) -> Iterator[Schedule]:
        """Schedules of these stages alone, fewest stages first; none where nothing fits."""
        best = min(self._choices, key=_Choice.length)
        stages, found = best.stages, best.found
        if found is None:
            return
        joined = stages.with_segments(_joined(stages.segments, found.schedule))
        ways = _renumbered(stages, joined, found)
        again = no_wait_in_order(joined.order, *ways, joined.share.room, joined.link)
        if again is not None and again.makespan_ns <= found.makespan_ns:
            yield joined.timed(again.schedule)
        yield stages.timed(found.schedule)


class _Choice(NamedTuple):
    """Stages, and what the per-device planner decides for them; None where nothing fits."""

    stages: _Stages
    found: NoWaitSchedule | None
    improved: bool = False
    """Whether local search is over: it would find the same again."""

    def length(self) -> float:
        """Of a micro-batch, ns."""
        return math.inf if self.found is None else self.found.makespan_ns

    def climbed(self, go_on: GoOn) -> _Choice:
        """As `OneAtATime.choose` says."""
        best, at, last = self, 0, 0
        count = len(self.stages.segments)
        while best.found is not None and at < last + count:
            for changed in best.stages.changed(at % count):
                if not go_on():
                    return best
                if (choice := changed.chosen()).length() < best.length():
                    best, last = choice, at
            at += 1
        return best

    def searched(self, go_on: GoOn) -> _Choice:
        """As `OneAtATime.improve` says."""
        if self.improved or not go_on():
            return self
        best = min(self, self.stages.chosen(1, go_on), key=_Choice.length)
        return best._replace(improved=True)


def cut(layers: Segment, grain: int) -> list[Segment]:
    """First and last layers of parts of at most `grain` layers."""
    begin, last = layers
    return [(first, min(first + grain - 1, last)) for first in range(begin, last + 1, grain)]


@dataclass(frozen=True)
class _Stages:
    """The stages of one GPU as the per-device planner sees them."""

    costs: CostModel
    share: DeviceShare
    segments: Sequence[Segment]
    link: HostLink
    sends: tuple[Sends, ...]
    """What each of them sends, if it leaves."""

    def with_segments(self, segments: Sequence[Segment]) -> _Stages:
        """Other stages, each of which begins as one of these does, and sends what that does."""
        of_first = dict(zip((first for first, _ in self.segments), self.sends, strict=True))
        sends = tuple(of_first[first] for first, _ in segments)
        return replace(self, segments=segments, sends=sends)

    def changed(self, stage: int) -> Iterator[_Stages]:
        """One stage sends something else; each once, where two of `Sends` are the same."""
        known = {self.leaving(stage)}
        for other in Sends:
            sends = (*self.sends[:stage], other, *self.sends[stage + 1 :])
            changed = replace(self, sends=sends)
            leaves = changed.leaving(stage)
            if leaves[0] and leaves not in known:
                known.add(leaves)
                yield changed

    def time(self, op: DeviceOp) -> int:
        """Of a forward or backward, or of what lies between them, ns."""
        if self._is_gap(op):
            return self.share.gap_ns
        length = self.costs.forward_ns if op.kind is F else self.costs.backward_ns
        return length(*self.segments[op.index], self.share.gpu)

    def _is_gap(self, op: DeviceOp) -> bool:
        """Whether it stands for what the GPUs behind do: it holds what all stages keep."""
        return op.index == len(self.segments)

    def leaving(self, stage: int) -> Sent:
        """All bytes that a stage sends: those of runs of layers, and whether its input's."""
        (first, last), sends = self.segments[stage], self.sends[stage]
        options = byte_options(self.costs, first, last) if sends is not Sends.INPUT else ()
        size, runs = options[-1] if options else (0, ())
        enters = sends is not Sends.INSIDE
        entry = own_input_bytes(self.costs, first, covered=stage > 0) if enters else 0
        return size + entry, runs, entry > 0

    def _unit(self, stage: int, due: int) -> OffloadUnit:
        """What leaves of a stage: a whole input alone with its forward, else behind it (H3)."""
        sent = self.leaving(stage)
        early = leaves_early(self.costs.chain, self.segments[stage][0], sent)
        return OffloadUnit(stage, sent[0], stage + (not early), stage + 1, due)

    def chosen(self, more: int = 0, go_on: GoOn = always) -> _Choice:
        """What the per-device planner decides."""
        found = local_search(self.order, self.share.room, self.link, SLOTS, more, go_on)
        return _Choice(self, found)

    @property
    def order(self) -> ComputeOrder:
        """All forwards, then all backwards; each stage that can leave is a unit."""
        count = len(self.segments)
        sizes = [
            self.costs.segment(first, last, n > 0) for n, (first, last) in enumerate(self.segments)
        ]
        static = sum(size.states for size in sizes)
        behind = list(accumulate((size.saved for size in sizes), initial=static))
        forward = [behind[n] + size.running for n, size in enumerate(sizes)]
        backward = [behind[n + 1] + size.backward for n, size in enumerate(sizes)]
        for n, size in enumerate(sizes):
            # What comes back as the next backward begins is there before the update (O5).
            for op in range(max(0, n - 1), n + 1):
                backward[op] = max(backward[op], behind[n] + self._update(n, size))
        gap = [behind[-1]] * bool(self.share.gap_ns)
        forwards = [DeviceOp(F, n) for n in range(count + len(gap))]
        ops = [*forwards, *_backwards(count)]
        units = (self._unit(n, len(ops) - 1 - n) for n in range(count))
        return ComputeOrder(
            layers=count,
            static=static,
            ops=tuple(ops),
            need=np.array([*forward, *gap, *reversed(backward)]),
            held=np.array([*behind[1:], *gap, *reversed(behind[:-1])]),
            time=np.array([self.time(op) for op in ops]),
            units=tuple(unit for unit in units if unit.size),
        )

    def _update(self, stage: int, size: SegmentBytes) -> int:
        """Bytes of the update behind a backward, and of the gradient that this one hands on."""
        if self.costs.semantics != "2bw" or not size.optimizer:
            return 0
        first = self.segments[stage][0]
        gradient = self.costs.unsaved_bytes(first - 1, backward=True) if stage else 0
        return size.optimizer + gradient

    def timed(self, schedule: DeviceSchedule) -> Schedule:
        """What the per-device planner has decided, as a schedule of these stages."""
        lanes = Lanes(self.link)
        times: dict[OpId, tuple[int, ...]] = {}
        moves: dict[tuple[DeviceOpKind, int], int] = {}
        for op in schedule.ops:
            if op.computes:
                start = lanes.run(self.time(op))[0]
                if not self._is_gap(op):
                    times[OpKind.F if op.kind is F else OpKind.B, op.index] = (start,)
            elif op.kind is DeviceOpKind.WAIT:
                lanes.wait(op.index)
            else:
                transfer = Transfer(op.index, op.kind is OUT)
                moves[op.kind, op.index] = lanes.transfer(transfer, self.leaving(op.index)[0])[0]
        offloads = (self._offload(n, moves) for kind, n in sorted(moves) if kind is OUT)
        gpu = self.share.gpu
        stages = (Stage(id=n, layers=each, gpu=gpu) for n, each in enumerate(self.segments))
        return Schedule(tuple(stages), max(1, lanes.end), 1, times, tuple(offloads))

    def _offload(self, stage: int, moves: dict[tuple[DeviceOpKind, int], int]) -> StageOffload:
        size, runs, enters = self.leaving(stage)
        pair = moves[OUT, stage], moves[BACK, stage]
        return StageOffload(stage, runs, size, self.link.time_ns(size), {0: pair}, enters)


def _backwards(count: int) -> Iterator[DeviceOp]:
    return (DeviceOp(B, n) for n in reversed(range(count)))


def _renumbered(old: _Stages, new: _Stages, found: NoWaitSchedule) -> tuple[list[int], list[int]]:
    """The stages that leave and those that come back, in order, by their numbers among `new`."""
    number = {first: n for n, (first, _) in enumerate(new.segments)}
    out, back = (
        [number[old.segments[op.index][0]] for op in found.schedule.ops if op.kind is kind]
        for kind in (OUT, BACK)
    )
    return out, back


def _joined(segments: Sequence[Segment], schedule: DeviceSchedule) -> list[Segment]:
    """Neighbours that stay become one stage where nothing leaves or comes back between them."""
    moved = {op.index for op in schedule.ops if op.kind is OUT}
    apart = {n for n in range(len(segments)) if n in moved or n - 1 in moved}
    before: DeviceOp | None = None
    between = False
    for op in schedule.ops:
        if op.computes:
            if between and before is not None and before.kind is op.kind:
                apart.add(max(before.index, op.index))
            before, between = op, False
        else:
            between |= op.kind is not OUT
    joined = [segments[0]]
    for n, (first, last) in enumerate(segments[1:], start=1):
        if n in apart:
            joined.append((first, last))
        else:
            joined[-1] = (joined[-1][0], last)
    return joined
