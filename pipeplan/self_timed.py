"""Eager 1F1B: every GPU runs what is there, at most so many micro-batches in flight; its cycle.

Nothing is planned: stages react. From some micro-batch on the execution repeats itself, with k
micro-batches per cycle, and that cycle is a periodic schedule like any other. One stage per GPU.
Here are only names, lengths and places: planner and baselines bring their own durations.

Source: D. Narayanan et al., "PipeDream" (SOSP 2019), section 3.2; Beaumont, Eyraud-Dubois, Shilova
(2020), section 7, which simulates 500 micro-batches. The exact detection of the cycle is ours.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from heapq import heappop, heappush
from typing import Literal, NamedTuple

from pipeplan.plan import OpKind

MICROBATCHES = 500

Order = Literal["alternate", "backward", "strict"]
"""What a GPU does next: `alternate` the kind it did not do last, if it can, else the other;
`backward` a backward whenever there is one; `strict` a forward whenever it may, waiting for it."""


class Step(NamedTuple):
    """One op of a micro-batch: its name, what it excludes others on, its length in ns."""

    kind: OpKind
    stage: int
    resource: Hashable
    duration: int


@dataclass(frozen=True, slots=True)
class Cycle:
    """What repeats: k micro-batches every `period` ns; `times[i][c]` starts step i of copy c.

    `most` are, per stage, the most micro-batches in flight from the first one on. With any caps
    between these and the ones given, the execution is the same (but where the order is `strict`).
    """

    k: int
    period: int
    times: tuple[tuple[int, ...], ...]
    most: tuple[int, ...]


def staircase(stages: int, most: int) -> tuple[int, ...]:
    """Caps of 1F1B: `most` micro-batches in the first stage, one less in each one behind it."""
    return tuple(max(1, most - stage) for stage in range(stages))


def eager_cycle(
    steps: Sequence[Step],
    caps: Sequence[int],
    order: Order = "alternate",
    microbatches: int = MICROBATCHES,
) -> Cycle | None:
    """What eager execution settles into; None if it stops or `microbatches` show no cycle.

    Args:
        steps: of one micro-batch in chain order; each stage's F and B on a resource of its own.
        caps: per stage, the most micro-batches between the start of F and the end of B; >= 1.
        order: what a GPU does next where it has a choice.
        microbatches: after how many starts to give up.
    """
    return _Execution(steps, caps, order).cycle(microbatches)


def eager_pace(
    steps: Sequence[Step], caps: Sequence[int], order: Order, microbatches: int
) -> Fraction | None:
    """Ns per micro-batch that eager execution takes in the second half of `microbatches`.

    Cheaper than a cycle, and about as long. None if it stops, or ends that soon.
    """
    return _Execution(steps, caps, order).pace(microbatches)


class _State(NamedTuple):
    """All that decides what happens next; micro-batches are counted from the last exit."""

    begun: tuple[int, ...]
    running: tuple[tuple[int, int], ...]
    """(ns until its end, step)."""
    queues: tuple[tuple[int, ...], ...]
    last: tuple[int, ...]


class _Execution:
    """Eager execution of one pipeline, event by event, until its state repeats."""

    def __init__(self, steps: Sequence[Step], caps: Sequence[int], order: Order) -> None:
        self._steps, self._caps, self._order = steps, caps, order
        self._length = [step.duration for step in steps]
        self._stage = [step.stage for step in steps]
        self._compute = [step.kind.is_compute for step in steps]
        self._begun: list[list[int]] = [[] for _ in steps]
        """Per step, when its micro-batches started."""
        self._done = [0] * len(steps)
        self._forward = self._numbers(OpKind.F)
        self._backward = self._numbers(OpKind.B)
        self._idle = [True] * len(caps)
        self._last = list(self._backward)
        """Per stage, the step it started last."""
        self._most = [0] * len(caps)
        """Per stage, the most micro-batches in flight so far."""
        links = {step.resource for step in steps if not step.kind.is_compute}
        self._queues: dict[Hashable, deque[int]] = {link: deque() for link in links}
        self._free = dict.fromkeys(links, True)
        self._running: list[tuple[int, int]] = []
        """(end, step), a heap; a resource runs one step at a time, in order of micro-batches."""
        self._stages = set(range(len(caps)))
        """Those that something changed for since they were last asked for a step; `_links` too."""
        self._links: set[Hashable] = set()

    def _numbers(self, kind: OpKind) -> list[int]:
        found = {step.stage: i for i, step in enumerate(self._steps) if step.kind is kind}
        return [found[stage] for stage in range(len(self._caps))]

    def cycle(self, microbatches: int) -> Cycle | None:
        """Runs until the state at an exit is one that has been seen before."""
        last = len(self._steps) - 1
        seen: dict[_State, tuple[int, int]] = {}
        now = exits = 0
        self._start_all(now)
        while self._running and len(self._begun[0]) <= microbatches:
            now = self._advance(microbatches)
            if self._done[last] == exits:
                continue
            exits = self._done[last]
            state = self._state(now, exits)
            if state in seen:
                then, earlier = seen[state]
                return self._cut(state, exits, earlier, now - then)
            seen[state] = now, exits
        return None

    def pace(self, microbatches: int) -> Fraction | None:
        """Runs until so many have begun; ns from exit to exit, on average over the later half."""
        self._start_all(0)
        while self._running and len(self._begun[0]) <= microbatches:
            self._advance(microbatches)
        exits = self._begun[-1]
        half = len(exits) // 2
        if len(self._begun[0]) <= microbatches or not half:
            return None
        return Fraction(exits[-1] - exits[half - 1], len(exits) - half)

    def _advance(self, microbatches: int) -> int:
        """To the next instant at which something ends, and until nothing can start there.

        Where all steps last no time that instant would never end: it ends with the micro-batches.
        """
        now = self._running[0][0]
        while self._running and self._running[0][0] == now and len(self._begun[0]) <= microbatches:
            while self._running and self._running[0][0] == now:
                self._end(heappop(self._running)[1])
            self._start_all(now)
        return now

    def _end(self, step: int) -> None:
        self._done[step] += 1
        self._stir(step)
        if self._compute[step]:
            self._idle[self._stage[step]] = True
        else:
            self._free[self._steps[step].resource] = True
        after = step + 1
        if after < len(self._steps):
            self._stir(after)
            if not self._compute[after]:
                self._queues[self._steps[after].resource].append(after)

    def _stir(self, step: int) -> None:
        """What runs `step` may have something to start."""
        if self._compute[step]:
            self._stages.add(self._stage[step])
        else:
            self._links.add(self._steps[step].resource)

    def _start_all(self, now: int) -> None:
        for stage in self._stages:
            step = self._choose(stage) if self._idle[stage] else None
            if step is not None:
                self._idle[stage] = False
                self._last[stage] = step
                self._start(step, now)
        for link in self._links:
            if self._free[link] and self._queues[link]:
                self._free[link] = False
                self._start(self._queues[link].popleft(), now)
        self._stages.clear()
        self._links.clear()

    def _start(self, step: int, now: int) -> None:
        self._begun[step].append(now)
        stage = self._stage[step]
        if step == self._forward[stage]:
            self._most[stage] = max(self._most[stage], self._in_flight(stage))
        heappush(self._running, (now + self._length[step], step))

    def _choose(self, stage: int) -> int | None:
        """The step that an idle GPU starts, if any."""
        forward, backward = self._forward[stage], self._backward[stage]
        may = self._in_flight(stage) < self._caps[stage]
        if self._order == "strict":
            wanted = forward if may else backward
            return wanted if self._waits(wanted) else None
        first, second = backward, forward
        if self._order == "alternate" and self._last[stage] == backward:
            first, second = second, first
        for step in (first, second):
            if (step == backward or may) and self._waits(step):
                return step
        return None

    def _in_flight(self, stage: int) -> int:
        """Micro-batches between the start of the stage's forward and the end of its backward."""
        return len(self._begun[self._forward[stage]]) - self._done[self._backward[stage]]

    def _waits(self, step: int) -> bool:
        """Whether a micro-batch waits for `step`; the input never ends."""
        return step == 0 or self._done[step - 1] > len(self._begun[step])

    def _state(self, now: int, exits: int) -> _State:
        """What repeats itself from `now` on; how many of a step are done follows from these."""
        return _State(
            begun=tuple(len(starts) - exits for starts in self._begun),
            running=tuple(sorted((end - now, step) for end, step in self._running)),
            queues=tuple(tuple(queue) for queue in self._queues.values()),
            last=tuple(self._last),
        )

    def _cut(self, state: _State, exits: int, earlier: int, period: int) -> Cycle:
        """Between two equal states each step begins k times; all other times follow."""
        k = exits - earlier
        times = []
        for starts, ahead in zip(self._begun, state.begun, strict=True):
            first = earlier + ahead
            turns = [divmod(microbatch - first, k) for microbatch in range(k)]
            times.append(tuple(starts[first + copy] + turn * period for turn, copy in turns))
        return Cycle(k, period, tuple(times), tuple(self._most))
