"""Eager 1F1B: every GPU runs what is there, at most so many micro-batches in flight; its cycle.

Nothing is planned: stages react. From some micro-batch on the execution repeats itself, with k
micro-batches per cycle, and that cycle is a periodic schedule like any other.

Source: D. Narayanan et al., "PipeDream" (SOSP 2019), section 3.2; Beaumont, Eyraud-Dubois, Shilova
(2020), section 7, which simulates 500 micro-batches. The exact detection of the cycle is ours.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from typing import Literal, NamedTuple

from pipeplan.baselines.timed import Times, present, timed
from pipeplan.errors import InputError
from pipeplan.plan import OpKind, Plan
from pipeplan.simulator.tape import Ops, number

MICROBATCHES = 500

Order = Literal["alternate", "backward", "strict"]
"""What a GPU does next: `alternate` the kind it did not do last, if it can, else the other;
`backward` a backward whenever there is one; `strict` a forward whenever it may, waiting for it."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How stages react: the most micro-batches in flight at each, and what comes first."""

    caps: tuple[int, ...]
    order: Order = "alternate"


@dataclass(frozen=True, slots=True)
class Cycle:
    """What repeats: k micro-batches every `period` ns, their start times by op."""

    k: int
    period: int
    times: Times

    def in_flight(self, ops: Ops) -> list[int]:
        """Per stage, the most micro-batches at once between start of F and end of B."""
        return [
            self._in_flight(ops, number(OpKind.F, stage), number(OpKind.B, stage))
            for stage in range(len(ops.update))
        ]

    def _in_flight(self, ops: Ops, forward: int, backward: int) -> int:
        period = self.period
        starts = self.times[forward]
        ends = [time + ops.duration[backward] for time in self.times[backward]]
        level = sum(e // period - s // period for s, e in zip(starts, ends, strict=True))
        events = [(end % period, -1) for end in ends] + [(start % period, 1) for start in starts]
        changes = accumulate((change for _, change in sorted(events)), initial=level)
        return max(changes)


def eager_cycle(
    outline: Plan, ops: Ops, policy: Policy, microbatches: int = MICROBATCHES
) -> Cycle | None:
    """What eager execution of `outline` settles into; None if it shows no cycle.

    Args:
        outline: stages, one per GPU (`Setting.outline`).
        ops: those of `outline`.
        policy: how stages react.
        microbatches: how many to simulate.
    """
    return Execution(outline, ops, policy).cycle(microbatches)


def eager_plan(outline: Plan, policy: Policy) -> Plan | None:
    """The cycle of `outline` under `policy` as a plan, if there is one."""
    ops = Ops.of(outline)
    cycle = eager_cycle(outline, ops, policy)
    return None if cycle is None else timed(outline, ops, cycle.times, cycle.k, cycle.period)


def staircase(stages: int, most: int) -> tuple[int, ...]:
    """Caps of 1F1B: `most` micro-batches in the first stage, one less in each one behind it."""
    return tuple(max(1, most - stage) for stage in range(stages))


class State(NamedTuple):
    """All that decides what happens next; micro-batches are counted from the last exit."""

    begun: tuple[int, ...]
    running: tuple[tuple[int, int], ...]
    """(ns until its end, op)."""
    queues: tuple[tuple[int, ...], ...]
    last: tuple[int, ...]


class Execution:
    """Eager execution of one pipeline, event by event, until its state repeats."""

    def __init__(self, outline: Plan, ops: Ops, policy: Policy) -> None:
        used = [stage.gpu for stage in outline.stages]
        if len(used) != len(set(used)):
            raise InputError("eager 1F1B: got two stages on one GPU, need one stage per GPU")
        self._ops, self._policy = ops, policy
        self._all = present(ops)
        self._link = {
            op: outline.cluster.links.resource(*place)
            for op in self._all
            if isinstance(place := ops.place[op], tuple)
        }
        self._queues: dict[tuple[int, int], deque[int]] = {
            link: deque() for link in self._link.values()
        }
        self._free = dict.fromkeys(self._queues, True)
        self._begun: list[list[int]] = [[] for _ in ops.present]
        """Per op, when its micro-batches started."""
        self._done = [0] * len(ops.present)
        stages = range(len(outline.stages))
        self._forward = [number(OpKind.F, stage) for stage in stages]
        self._backward = [number(OpKind.B, stage) for stage in stages]
        self._idle = [True] * len(outline.stages)
        self._last = list(self._backward)
        """Per stage, the op it started last."""
        self._running: list[tuple[int, int]] = []
        """(end, op), a heap; a resource runs one op at a time, in order of micro-batches."""

    def cycle(self, microbatches: int) -> Cycle | None:
        """Runs until the state at an exit is one that has been seen before."""
        first, last = number(OpKind.F, 0), number(OpKind.B, 0)
        seen: dict[State, tuple[int, int]] = {}
        now = exits = 0
        self._start_all(now)
        while len(self._begun[first]) <= microbatches:
            now = self._advance(now)
            if self._done[last] == exits:
                continue
            exits = self._done[last]
            state = self._state(now, exits)
            if state in seen:
                then, earlier = seen[state]
                return self._cut(state, exits, earlier, now - then)
            seen[state] = now, exits
        return None

    def _advance(self, now: int) -> int:
        """To the next instant at which something ends, and until nothing can start there."""
        now = self._running[0][0]
        while self._running and self._running[0][0] == now:
            ended = []
            while self._running and self._running[0][0] == now:
                ended.append(heappop(self._running)[1])
            for op in sorted(ended, key=self._ops.position.__getitem__):
                self._end(op)
            self._start_all(now)
        return now

    def _end(self, op: int) -> None:
        self._done[op] += 1
        if op in self._link:
            self._free[self._link[op]] = True
        else:
            self._idle[self._ops.stage(op)] = True
        after = self._ops.after[op]
        if after in self._link:
            self._queues[self._link[after]].append(after)

    def _start_all(self, now: int) -> None:
        for stage, idle in enumerate(self._idle):
            op = self._choose(stage) if idle else None
            if op is not None:
                self._idle[stage] = False
                self._last[stage] = op
                self._start(op, now)
        for link, queue in self._queues.items():
            if queue and self._free[link]:
                self._free[link] = False
                self._start(queue.popleft(), now)

    def _start(self, op: int, now: int) -> None:
        self._begun[op].append(now)
        heappush(self._running, (now + self._ops.duration[op], op))

    def _choose(self, stage: int) -> int | None:
        """The op that an idle GPU starts, if any."""
        forward, backward = self._forward[stage], self._backward[stage]
        may = len(self._begun[forward]) - self._done[backward] < self._policy.caps[stage]
        order = self._policy.order
        if order == "strict":
            op = forward if may else backward
            return op if self._waits(op) else None
        first, second = backward, forward
        if order == "alternate" and self._last[stage] == backward:
            first, second = second, first
        for op in (first, second):
            if self._waits(op) and (op == backward or may):
                return op
        return None

    def _waits(self, op: int) -> bool:
        """Whether a micro-batch waits for `op`; the input never ends."""
        before = self._ops.before[op]
        return before < 0 or self._done[before] > len(self._begun[op])

    def _state(self, now: int, exits: int) -> State:
        """What repeats itself from `now` on; how many of an op are done follows from these."""
        return State(
            begun=tuple(len(self._begun[op]) - exits for op in self._all),
            running=tuple(sorted((end - now, op) for end, op in self._running)),
            queues=tuple(tuple(queue) for queue in self._queues.values()),
            last=tuple(self._last),
        )

    def _cut(self, state: State, exits: int, earlier: int, period: int) -> Cycle:
        """Between two equal states each op begins k times; all other times follow from these."""
        k = exits - earlier
        times = {}
        for op, ahead in zip(self._all, state.begun, strict=True):
            first = earlier + ahead
            turns = [divmod(microbatch - first, k) for microbatch in range(k)]
            times[op] = [self._begun[op][first + copy] + turn * period for turn, copy in turns]
        return Cycle(k, period, times)
