"""List scheduling of a step: an idle GPU takes the op that a rule ranks first, if memory allows.

Two things go beyond plain list scheduling (Graham 1969):

- *Patience*: a GPU stays idle for an op that ranks before all that are ready and that is known to
  be ready within so many ns. Without it every transfer costs the length of whatever is ready.
- *Safety* (the banker's algorithm, Dijkstra 1965): a forward starts only if afterwards the
  micro-batches in flight on its GPU could still end one after the other. So no rule deadlocks
  but for messages: those that wait on a GPU are room that the check does not plan for.

Bytes are those of stages and messages at the times of this schedule; a few that depend on when
a rank posts a receive are left to the exact count (`ilp.memory`). Source: ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf
from typing import Final

from pipeplan.ilp.schedule import OpId, Schedule
from pipeplan.ilp.step.instance import StepInstance
from pipeplan.plan import OpKind

F, B, W, SEND_F, SEND_B = range(5)
"""Kinds of ops; B stands for I where the backward is split."""
_KINDS: Final = (OpKind.F, OpKind.B, OpKind.W, OpKind.SEND_F, OpKind.SEND_B)


@dataclass(frozen=True, slots=True)
class DispatchingRule:
    """Which op a GPU takes: the one with the smallest rank[kind][stage] + micro-batch * spacing.

    A step begins and ends unlike it goes on: an op of one micro-batch may rank earlier or later.

    Attributes:
        ranks: Of F, of B or I, and of W, by stage, in ns: when micro-batch 0 would have its turn.
        spacing: Between micro-batches, in ns.
        in_flight: By stage: most micro-batches between the start of F and the end of B or I.
        patience: For how long a GPU waits for an op that ranks first, in ns.
        shifts: By kind, stage and micro-batch: what is added to the rank, in ns; micro-batches of
            the second half count from the end, -1 is the last.
    """

    ranks: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
    spacing: float
    in_flight: tuple[int, ...]
    patience: int
    shifts: Mapping[tuple[int, int, int], float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepTimes:
    """When everything starts: by kind, by stage, by micro-batch; and the latest end, in ns."""

    starts: tuple[list[list[int]], ...]
    end: int
    ends: list[int]
    """By GPU: the end of its last op."""


def schedule_step(
    instance: StepInstance, rule: DispatchingRule, horizon: float = inf
) -> StepTimes | None:
    """The step as the rule has it; None if it ends at `horizon` or later, or does not fit."""
    return ListScheduler(instance, rule, horizon).run()


class _Line:
    """Ops of one kind of a stage: micro-batches take their turns in order.

    Attributes:
        base: Rank of micro-batch 0 without its shift.
        lasts: One op, in ns.
        begun: Micro-batches that have started.
        ready: Micro-batches whose input is there.
        coming: When inputs are expected that are on their way.
        rank: Of the next micro-batch.
        starts: Of all that have started.
    """

    __slots__ = ("base", "begun", "coming", "gpu", "kind", "lasts", "rank", "ready", "stage",
                 "starts")  # fmt: skip

    def __init__(self, kind: int, stage: int, gpu: int, lasts: int, base: float) -> None:
        self.kind, self.stage, self.gpu, self.lasts, self.base = kind, stage, gpu, lasts, base
        self.begun = self.ready = 0
        self.coming: deque[int] = deque()
        self.rank = base
        self.starts: list[int] = []


class ListScheduler:
    """One run: events in order of time, then every idle GPU that one of them concerns.

    Attributes:
        events: How many there were so far: what the run cost.
    """

    def __init__(
        self, instance: StepInstance, rule: DispatchingRule, horizon: float = inf
    ) -> None:
        """A step that ends at `horizon` or later is given up as soon as that is known."""
        stages, gpus = range(len(instance.stages)), len(instance.hosted)
        self.of, self.rule, self.horizon = instance, rule, horizon
        self.gpu = [stage.gpu for stage in instance.stages]
        lasts = (instance.forward, instance.backward, instance.weight)
        self.lines = [
            [_Line(kind, s, self.gpu[s], lasts[kind][s], rule.ranks[kind][s]) for s in stages]
            for kind in (F, B, W)
        ]
        """By kind and stage."""
        self.shifts = {
            (kind, stage, number + instance.microbatches * (number < 0)): by
            for (kind, stage, number), by in rule.shifts.items()
        }
        for kind, stage in {key[:2] for key in self.shifts}:
            self._rank(self.lines[kind][stage])
        self.own = [
            [self.lines[kind][s] for s in own for kind in (W, B, F) if kind != W or lasts[W][s]]
            for own in instance.hosted
        ]
        """By GPU."""
        self.lines[F][0].ready = instance.microbatches
        self.sends: tuple[list[list[int]], ...] = tuple([[] for _ in stages] for _ in range(2))
        self.inputs = [[self._input(stage, kind) for stage in stages] for kind in (F, B)]
        self.held, self.busy, self.ends = [0] * gpus, [False] * gpus, [0] * gpus
        self.whole = [sum(instance.saved[s] for s in own) for own in instance.hosted]
        self.latest = [horizon - instance.work_ns(gpu) for gpu in range(gpus)]
        """By GPU: when it must start its next op to end before the horizon."""
        self.link_free: dict[tuple[int, ...], int] = {}
        self.queue: list[tuple[int, int, int, int]] = []
        self.events = 0

    def run(self) -> StepTimes | None:
        """The step; None if it ends too late or does not fit."""
        now, concerned, queue = 0, set(range(len(self.busy))), self.queue
        while True:
            for gpu in concerned:
                if not self.busy[gpu]:
                    if now >= self.latest[gpu]:
                        return None
                    self._start_next(gpu, now)
            if not queue:
                break
            now = queue[0][0]
            concerned = set()
            while queue and queue[0][0] == now:
                _, _, kind, stage = heappop(queue)
                concerned.add(self._end(kind, stage, now))
        if any(line.begun < self.of.microbatches for own in self.own for line in own):
            return None
        starts = tuple([line.starts for line in lines] for lines in self.lines)
        return StepTimes((*starts, *self.sends), now, self.ends)

    def _start_next(self, gpu: int, now: int) -> None:
        """Start the op that ranks first, unless one that is worth waiting for ranks before it."""
        best, chosen, soon = inf, None, now + self.rule.patience
        for line in self.own[gpu]:
            if line.rank >= best:
                continue
            if line.begun >= line.ready:
                coming = line.coming
                if not coming or coming[0] > soon:
                    continue
            if line.kind == F and not self._may_enter(line):
                continue
            best, chosen = line.rank, line
        if chosen is not None and chosen.begun < chosen.ready:
            self._start(chosen, now)

    def _may_enter(self, line: _Line) -> bool:
        """Whether a forward keeps its limit and leaves the GPU in a safe state."""
        of, (forwards, backwards, _) = self.of, self.lines
        gpu, stage = line.gpu, line.stage
        if line.begun - backwards[stage].begun >= self.rule.in_flight[stage]:
            return False
        # The input that waits becomes part of what the forward keeps.
        held = self.held[gpu] - self.inputs[F][stage]
        free, whole = of.room[gpu] - held - of.saved[stage], self.whole[gpu]
        own = of.hosted[gpu]
        for microbatch in range(backwards[own[0]].begun, forwards[own[0]].begun + 1):
            if free >= whole or free < 0:
                break
            needs = returns = 0
            for other in own:
                if forwards[other].begun + (other == stage) <= microbatch:
                    needs += of.saved[other]
                elif backwards[other].begun <= microbatch:
                    returns += of.saved[other]
            if needs > free:
                return False
            free += returns
        return free >= 0

    def _rank(self, line: _Line) -> None:
        """Of the micro-batch that is next."""
        line.rank = line.base + line.begun * self.rule.spacing
        if self.shifts:
            line.rank += self.shifts.get((line.kind, line.stage, line.begun), 0)

    def _start(self, line: _Line, now: int) -> None:
        of, kind, stage, gpu = self.of, line.kind, line.stage, line.gpu
        self.busy[gpu] = True
        line.begun += 1
        line.starts.append(now)
        self._rank(line)
        end = now + line.lasts
        self.latest[gpu] += line.lasts
        self._push(end, kind, stage)
        if kind == F:
            self.held[gpu] += of.saved[stage] - self.inputs[F][stage]
            if stage + 1 < len(self.gpu):
                hop = of.outward[stage]
                self.lines[F][stage + 1].coming.append(end + (hop.ns if hop else 0))
            else:
                self.lines[B][stage].coming.append(end)
        elif kind == B:
            self.held[gpu] -= self.inputs[B][stage]
            if stage:
                hop = of.homeward[stage]
                self.lines[B][stage - 1].coming.append(end + (hop.ns if hop else 0))

    def _input(self, stage: int, kind: int) -> int:
        """Bytes that lay there for the op until it starts."""
        other = stage - 1 if kind == F else stage + 1
        if not 0 <= other < len(self.gpu):
            return 0
        hop = self.of.outward[other] if kind == F else self.of.homeward[other]
        return hop.received if hop else self.of.direct[min(stage, other)][kind]

    def _end(self, kind: int, stage: int, now: int) -> int:
        """What an op's end changes; the GPU that may now have something to do."""
        gpu, of = self.gpu[stage], self.of
        if kind == SEND_F:
            self.held[gpu] -= of.outward[stage].sent  # type: ignore[union-attr]
            return self._arrive(F, stage + 1)
        if kind == SEND_B:
            self.held[gpu] -= of.homeward[stage].sent  # type: ignore[union-attr]
            return self._arrive(B, stage - 1)
        self.busy[gpu], self.ends[gpu] = False, now
        if kind == F:
            if stage + 1 == len(self.gpu):
                self._arrive(B, stage)
            else:
                self._hand_on(F, stage, stage + 1, now)
        elif kind == B:
            self.held[gpu] -= of.saved[stage]
            if of.weight[stage]:
                self.held[gpu] += of.kept[stage]
                self.lines[W][stage].ready += 1
            if stage:
                self._hand_on(B, stage, stage - 1, now)
        else:
            self.held[gpu] -= of.kept[stage]
        return gpu

    def _hand_on(self, kind: int, stage: int, other: int, now: int) -> None:
        """An output goes to the neighbour: at once, or over the link as soon as that is free."""
        gpu, hop = self.gpu[stage], (self.of.outward if kind == F else self.of.homeward)[stage]
        if hop is None:
            self.held[gpu] += self.of.direct[min(stage, other)][kind]
            self._arrive(kind, other)
            return
        start = max(now, self.link_free.get(hop.link, 0))
        self.link_free[hop.link] = start + hop.ns
        self.held[gpu] += hop.sent
        self.held[self.gpu[other]] += hop.received
        self.sends[kind][stage].append(start)
        self._push(start + hop.ns, SEND_F if kind == F else SEND_B, stage)

    def _arrive(self, kind: int, stage: int) -> int:
        line = self.lines[kind][stage]
        line.ready += 1
        line.coming.popleft()
        return line.gpu

    def _push(self, time: int, kind: int, stage: int) -> None:
        self.events += 1
        heappush(self.queue, (time, self.events, kind, stage))


def as_schedule(instance: StepInstance, found: StepTimes) -> Schedule:
    """The step plan (T6): k = m micro-batches, the period is the latest end."""
    times: dict[OpId, tuple[int, ...]] = {}
    for kind, rows in zip(_KINDS, found.starts, strict=True):
        for stage, row in enumerate(rows):
            if row:
                name = instance.stages[stage].backward if kind is OpKind.B else kind
                times[name, stage] = tuple(row)
    return Schedule(instance.stages, max(1, found.end), instance.microbatches, times)
