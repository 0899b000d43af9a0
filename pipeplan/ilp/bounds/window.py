"""A bound on contiguous plans of any k: a few micro-batches in a row on each partition.

Whatever k is, some N + 1 micro-batches in a row of a plan of T per micro-batch enter the pipeline
within N T: that is their average. Take the ops of these alone, in order, each GPU and each link
one at a time, and no forward of micro-batch m + c(s) at stage s before the backward of m has ended
there, c(s) = the most that its GPU has room for. If CP-SAT proves that they do not fit into N T,
neither T nor anything shorter is possible on the partition, however many micro-batches a period
holds. Sums along the chain (`contiguous_bound`) do not see that a GPU or a half-duplex link is
asked for twice at once. The bound is the smallest over all partitions whose floor is below the
best plan's period. Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from heapq import heapify, heappop, heappush
from itertools import islice
from math import ceil
from typing import Final, NamedTuple

from ortools.sat.python import cp_model

from pipeplan.ilp.contiguous.in_flight_limits import max_in_flight
from pipeplan.ilp.contiguous.steady_states import steps_of
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.cpsat.solve import configured, run
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.symmetry import gpu_classes
from pipeplan.plan import OpKind, Stage
from pipeplan.self_timed import Step

FEW: Final = 500
"""Partitions up to which there is a bound."""
LOOKED_AT: Final = 10_000
"""Beginnings of partitions, from the last stage on, that are looked at to find them."""
LONG: Final = 8
"""Micro-batches of a window at least; a multiple of the most that the tightest stage keeps."""
TIGHT: Final = 4
"""Where the tightest stage keeps more, sums say nearly all, and windows would be too long."""
LENGTHS: Final = (1, 2)
"""What one window leaves open is asked of one so many times as long."""
FINE: Final = Fraction(1, 200)
"""Share of the best period to which a partition's bound is found."""
TICKS: Final = 1 << 20
"""All ops of a window in a row take at most about this many ticks."""
STEP_S: Final = 0.5
"""Time limit of one question."""

Cap = int | None
"""The most micro-batches of a stage; None for any number."""


class LimitedPartition(NamedTuple):
    """Stages on GPUs 0, 1, .. and what each of their GPUs has room for."""

    stages: tuple[Stage, ...]
    caps: tuple[Cap, ...]


def raise_bound(state: Incumbent, seconds: float) -> None:
    """Raise the bound on contiguous plans, at most to the best one's period, in `seconds`."""
    known, best = state.bounds.get("contiguous"), state.contiguous
    if known is None or best is None or known >= best or state.options.offload:
        return
    if len(gpu_classes(state.costs)) > 1:
        return
    state.set_phase("window bound")
    found = suited(state.costs, best, state.most_in_flight)
    if found is not None:
        _Queue(state, found, best, state.elapsed + min(seconds, state.remaining)).run()


@dataclass
class _Queue:
    """Partitions by what is proven of each; the smallest is what is proven of all."""

    state: Incumbent
    found: list[tuple[Fraction, LimitedPartition]]
    best: Fraction
    """Period of the best contiguous plan."""
    end: float
    ceiling: Fraction = field(init=False)
    """No partition's bound is asked for beyond it: the smallest that could not be raised."""
    _heap: list[tuple[Fraction, int, bool]] = field(init=False)
    """(bound, index, whether no better one is found for it)."""

    def __post_init__(self) -> None:
        """Floors are the bounds to begin with."""
        self.ceiling = self.best
        self._heap = [(floor, index, False) for index, (floor, _) in enumerate(self.found)]
        heapify(self._heap)

    def run(self) -> None:
        """Raise the lowest bound until it is one that cannot be raised, or time is over."""
        while self._heap:
            bound, index, final = heappop(self._heap)
            self.state.raise_bound("contiguous", min(bound, self.ceiling))
            if final or self.state.done or self.state.elapsed >= self.end:
                return
            raised = self._raised(bound, self.found[index][1])
            if raised < self.ceiling:
                heappush(self._heap, (raised, index, True))
                self.ceiling = raised
        self.state.raise_bound("contiguous", self.ceiling)

    def _raised(self, low: Fraction, pipeline: LimitedPartition) -> Fraction:
        """What is proven of one partition, by bisection; a lowered ceiling is asked for first."""
        windows = FiniteWindow.of(self.state.costs, pipeline)
        high = self.ceiling
        target = high if high < self.best else (low + high) / 2
        while windows and target > low and self.state.elapsed < self.end:
            proven = (self._proven(window, target) for window in windows)
            least = next((bound for bound in proven if bound is not None), None)
            if least is None:
                high = target
            else:
                low = max(low, least)
            if low >= self.ceiling or high - low <= FINE * self.ceiling:
                break
            target = (low + high) / 2
        return low

    def _proven(self, window: FiniteWindow, period: Fraction) -> Fraction | None:
        """A bound of at least `period`, but for a tick, or None where it is not proven."""
        deadline = (ceil(period * window.count) - 1) // window.tick
        limit = min(STEP_S, max(0.1, self.end - self.state.elapsed))
        solver = configured(self.state.options, limit)
        if run(solver, window.model(deadline)) != cp_model.INFEASIBLE:
            return None
        return Fraction((deadline + 1) * window.tick, window.count)


@dataclass(frozen=True)
class FiniteWindow:
    """Micro-batches 0..count of one partition; durations in ticks, rounded down."""

    steps: tuple[Step, ...]
    caps: tuple[Cap, ...]
    count: int
    tick: int

    @classmethod
    def of(cls, costs: CostModel, pipeline: LimitedPartition) -> list[FiniteWindow]:
        """Windows whose lengths suit the tightest stage, if there is a tight one."""
        steps = tuple(steps_of(costs, pipeline.stages))
        needed = {
            Fraction(span, cap): cap
            for span, cap in zip(_spans(steps), pipeline.caps, strict=True)
            if cap is not None
        }
        if not needed or needed[max(needed)] > TIGHT:
            return []
        cap = needed[max(needed)]
        counts = [cap * -(-LONG // cap) * times for times in LENGTHS]
        way = sum(step.duration for step in steps)
        ticks = [max(1, (count + 1) * way // TICKS) for count in counts]
        return [
            cls(steps, pipeline.caps, count, tick)
            for count, tick in zip(counts, ticks, strict=True)
        ]

    def model(self, deadline: int) -> cp_model.CpModel:
        """Its ops, the last micro-batch beginning at most `deadline` ticks after the first."""
        model = cp_model.CpModel()
        lengths = [step.duration // self.tick for step in self.steps]
        latest = (self.count + 1) * sum(lengths)  # early enough for any order, all times least
        starts = [
            [model.new_int_var(0, latest, f"{index}_{number}") for index in range(len(lengths))]
            for number in range(self.count + 1)
        ]
        self._order(model, starts, lengths)
        self._room(model, starts, lengths)
        places: dict[object, list[cp_model.IntervalVar]] = {}
        for row in starts:
            for step, start, length in zip(self.steps, row, lengths, strict=True):
                if length:
                    interval = model.new_fixed_size_interval_var(start, length, "op")
                    places.setdefault(step.resource, []).append(interval)
        for intervals in places.values():
            model.add_no_overlap(intervals)
        model.add(starts[0][0] == 0)
        model.add(starts[-1][0] <= deadline)
        return model

    def _order(
        self, model: cp_model.CpModel, starts: list[list[cp_model.IntVar]], lengths: list[int]
    ) -> None:
        """(R2) along the chain, (R5) between one micro-batch and the next."""
        for number, row in enumerate(starts):
            for index, length in enumerate(lengths):
                if index + 1 < len(row):
                    model.add(row[index] + length <= row[index + 1])
                if number + 1 < len(starts):
                    model.add(row[index] + length <= starts[number + 1][index])

    def _room(
        self, model: cp_model.CpModel, starts: list[list[cp_model.IntVar]], lengths: list[int]
    ) -> None:
        """A forward waits for the backward of the micro-batch whose place it takes."""
        index = {(step.kind, step.stage): number for number, step in enumerate(self.steps)}
        for stage, cap in enumerate(self.caps):
            forward, backward = index[OpKind.F, stage], index[OpKind.B, stage]
            for number in range(self.count + 1 - cap if cap is not None else 0):
                assert cap is not None
                gone = starts[number][backward] + lengths[backward]
                model.add(starts[number + cap][forward] >= gone)


def suited(
    costs: CostModel, below: Fraction, most: int | None = None
) -> list[tuple[Fraction, LimitedPartition]] | None:
    """Partitions whose floor is less than `below`, with it; None if they are too many.

    Args:
        costs: Durations and bytes, on GPUs that are all alike.
        below: Nanoseconds per micro-batch.
        most: No stage may keep more micro-batches (R6); None for no limit.
    """
    search = _Partitions(costs, below, most)
    found = list(islice(search.extended(costs.layers, 0, (), Fraction(0)), FEW + 1))
    return found if len(found) <= FEW and search.looked_at <= LOOKED_AT else None


@dataclass
class _Partitions:
    """Builds partitions from the last stage to the first: all that a stage needs is behind it."""

    costs: CostModel
    below: Fraction
    most: int | None
    looked_at: int = 0

    def extended(
        self, end: int, span: int, behind: Sequence[tuple[int, int, Cap]], floor: Fraction
    ) -> Iterator[tuple[Fraction, LimitedPartition]]:
        """Partitions of layers 0..`end` - 1 before given stages.

        Args:
            end: First layer of the stages behind.
            span: From the end of the forward that is next to the start of its backward, in ns.
            behind: (first layer, last layer, cap) of the stages behind.
            floor: What these need per micro-batch.
        """
        if end == 0:
            yield floor, _pipeline(behind)
            return
        if len(behind) == self.costs.gpus:
            return
        for first in reversed(range(end)):
            self.looked_at += 1
            load = self.costs.load_ns(first, end - 1, 0)
            if load >= self.below or self.looked_at > LOOKED_AT:
                return
            stage = Stage(id=0, layers=(first, end - 1), gpu=0)
            cap = max_in_flight(self.costs, stage, self.most)
            if cap == 0:
                continue
            held = Fraction(span + load, cap) if cap is not None else Fraction(0)
            sent, busy = self._sends(first - 1) if first else (0, 0)
            needs = max(floor, Fraction(load), held, Fraction(busy))
            if needs < self.below:
                stages = ((first, end - 1, cap), *behind)
                yield from self.extended(first, span + load + sent, stages, needs)

    def _sends(self, boundary: int) -> tuple[int, int]:
        """Ns of both transfers of a cut, and for how long a link is busy with them."""
        forward = self.costs.send_forward_ns(boundary, 0, 1)
        backward = self.costs.send_backward_ns(boundary, 1, 0)
        half = self.costs.cluster.links.duplex == "half"
        return forward + backward, forward + backward if half else max(forward, backward)


def _pipeline(runs: Sequence[tuple[int, int, Cap]]) -> LimitedPartition:
    stages = tuple(
        Stage(id=index, layers=(first, last), gpu=index)
        for index, (first, last, _) in enumerate(runs)
    )
    return LimitedPartition(stages, tuple(cap for *_, cap in runs))


def _spans(steps: Sequence[Step]) -> list[int]:
    """Per stage, ns from the start of F to the end of B where nothing waits."""
    begun: dict[int, int] = {}
    spans: dict[int, int] = {}
    now = 0
    for step in steps:
        if step.kind is OpKind.F:
            begun[step.stage] = now
        now += step.duration
        if step.kind is OpKind.B:
            spans[step.stage] = now - begun[step.stage]
    return [spans[stage] for stage in sorted(spans)]
