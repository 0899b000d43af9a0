"""List scheduling of a step: an idle GPU takes the op that a rule ranks first, if memory allows.

Two things go beyond plain list scheduling (Graham 1969):

- *Patience*: a GPU stays idle for an op that ranks before all that are ready and that is known to
  be ready within so many ns. Without it every transfer costs the length of whatever is ready.
- *Safety* (the banker's algorithm, Dijkstra 1965): a forward starts only if afterwards the
  micro-batches in flight on its GPU could still end one after the other. So no rule deadlocks.

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
_WAIT: Final = -1


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
        self.lasts = (instance.forward, instance.backward, instance.weight)
        self.starts: tuple[list[list[int]], ...] = tuple([[] for _ in stages] for _ in range(5))
        self.begun = [[0] * len(stages) for _ in range(3)]
        """By kind and stage: micro-batches that have started; they do so in order."""
        self.ready = [[0] * len(stages) for _ in range(3)]
        """Micro-batches whose input is there."""
        self.ready[F][0] = instance.microbatches
        self.coming: list[list[deque[int]]] = [[deque() for _ in stages] for _ in range(3)]
        """When inputs are expected that are on their way."""
        self.held, self.busy, self.ends = [0] * gpus, [False] * gpus, [0] * gpus
        self.whole = [sum(instance.saved[s] for s in own) for own in instance.hosted]
        self.latest = [horizon - instance.work_ns(gpu) for gpu in range(gpus)]
        """By GPU: when it must start its next op to end before the horizon."""
        self.link_free: dict[tuple[int, ...], int] = {}
        self.queue: list[tuple[int, int, int, int]] = []
        self.events = 0
        self.shifts = {
            (kind, stage, number + instance.microbatches * (number < 0)): by
            for (kind, stage, number), by in rule.shifts.items()
        }

    def run(self) -> StepTimes | None:
        """The step; None if it ends too late or does not fit."""
        now, concerned = 0, set(range(len(self.busy)))
        while True:
            for gpu in concerned:
                if not self.busy[gpu]:
                    if now >= self.latest[gpu]:
                        return None
                    self._start_next(gpu, now)
            if not self.queue:
                break
            now = self.queue[0][0]
            concerned = set()
            while self.queue and self.queue[0][0] == now:
                _, _, kind, stage = heappop(self.queue)
                concerned.add(self._end(kind, stage, now))
        ended = all(
            begun == self.of.microbatches
            for kind in (F, B, W)
            for begun, lasts in zip(self.begun[kind], self.lasts[kind], strict=True)
            if kind != W or lasts
        )
        return StepTimes(self.starts, now, self.ends) if ended else None

    def _start_next(self, gpu: int, now: int) -> None:
        """Start the op that ranks first, unless one that is worth waiting for ranks before it."""
        rule, best, chosen = self.rule, inf, (_WAIT, 0)
        soon, shifts = now + rule.patience, self.shifts
        for stage in self.of.hosted[gpu]:
            for kind in (W, B, F):
                begun = self.begun[kind][stage]
                rank = rule.ranks[kind][stage] + begun * rule.spacing
                if shifts:
                    rank += shifts.get((kind, stage, begun), 0)
                if rank >= best:
                    continue
                is_ready = begun < self.ready[kind][stage]
                coming = self.coming[kind][stage]
                if not is_ready and not (coming and coming[0] <= soon):
                    continue
                if kind == F and not self._may_enter(gpu, stage):
                    continue
                best, chosen = rank, (kind if is_ready else _WAIT, stage)
        kind, stage = chosen
        if kind != _WAIT:
            self._start(kind, stage, gpu, now)

    def _may_enter(self, gpu: int, stage: int) -> bool:
        """Whether a forward keeps its limit and leaves the GPU in a safe state."""
        of, forwards, backwards = self.of, self.begun[F], self.begun[B]
        if forwards[stage] - backwards[stage] >= self.rule.in_flight[stage]:
            return False
        free = of.room[gpu] - self.held[gpu] - of.saved[stage]
        if free >= self.whole[gpu] or free < 0:
            return free >= 0
        own = of.hosted[gpu]
        for microbatch in range(backwards[own[0]], forwards[own[0]] + 1):
            needs = returns = 0
            for other in own:
                if forwards[other] + (other == stage) <= microbatch:
                    needs += of.saved[other]
                elif backwards[other] <= microbatch:
                    returns += of.saved[other]
            if needs > free:
                return False
            free += returns
        return True

    def _start(self, kind: int, stage: int, gpu: int, now: int) -> None:
        of = self.of
        self.busy[gpu] = True
        self.begun[kind][stage] += 1
        self.starts[kind][stage].append(now)
        end = now + self.lasts[kind][stage]
        self.latest[gpu] += self.lasts[kind][stage]
        self._push(end, kind, stage)
        if kind == F:
            self.held[gpu] += of.saved[stage] - self._input(stage, F)
            if stage + 1 < len(self.gpu):
                hop = of.outward[stage]
                self.coming[F][stage + 1].append(end + (hop.ns if hop else 0))
            else:
                self.coming[B][stage].append(end)
        elif kind == B:
            self.held[gpu] -= self._input(stage, B)
            if stage:
                hop = of.homeward[stage]
                self.coming[B][stage - 1].append(end + (hop.ns if hop else 0))

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
                self.ready[W][stage] += 1
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
        send = SEND_F if kind == F else SEND_B
        self.starts[send][stage].append(start)
        self._push(start + hop.ns, send, stage)

    def _arrive(self, kind: int, stage: int) -> int:
        self.ready[kind][stage] += 1
        self.coming[kind][stage].popleft()
        return self.gpu[stage]

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
