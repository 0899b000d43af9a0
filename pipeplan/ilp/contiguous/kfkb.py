"""Contiguous plans whose period holds several micro-batches, found by eager execution.

A stage's average number of micro-batches in flight need not be an integer, so where memory is
scarce a cycle of k > 1 can beat every 1F1B plan (Beaumont, Eyraud-Dubois, Shilova 2020, 4.3). A
candidate is a partition with one cap per stage, the most micro-batches that its GPU can hold.
Eager execution settles into a cycle, which is offered as a plan.

Partitions are visited best first (all of them where there are few) by what each needs at least,
whatever the order of its ops:

    floor = max over stages s of ( load(s), load of a link, V(s) / cap(s) ),

V(s) = all work and transfers from F_s to B_s of one micro-batch: at fewer than V / T micro-batches
on average it cannot flow. Neighbours move, remove or add one border. Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from heapq import heappop, heappush
from itertools import combinations, count, pairwise
from math import comb

from pipeplan.eager import Order, Step, eager_cycle, staircase
from pipeplan.ilp.contiguous.solver import ContiguousSolver, gpu_classes
from pipeplan.ilp.facts.costs import Costs
from pipeplan.ilp.facts.schedule import Schedule, chain_ops, duration, resource
from pipeplan.ilp.state.incumbent import Incumbent
from pipeplan.plan import OpKind, Stage

PERIODS = 24
"""How many values of T each dynamic program is asked for a partition to start from."""
FEW = 6000
"""Partitions up to which all are looked at."""
MAX_K = 64
"""Longest cycle offered, in micro-batches."""
ORDERS: tuple[Order, ...] = ("alternate", "backward")

Stages = tuple[Stage, ...]


@dataclass
class EagerSearch:
    """Best-first search over contiguous partitions; offers the eager cycles of each."""

    state: Incumbent
    _heap: list[tuple[Fraction, int, Stages, tuple[int, ...]]] = field(default_factory=list)
    _seen: set[Stages] = field(default_factory=set)
    _number: Iterator[int] = field(default_factory=count)

    def run(self, seconds: float) -> None:
        """Search until no partition left can beat the best plan, or `seconds` have passed."""
        end = self.state.elapsed + min(seconds, self.state.remaining)
        self.state.enter("eager cycles")
        alike = len(gpu_classes(self.state.costs)) == 1
        for stages in self._starts():
            self._add(stages)
        if alike:
            for stages in _all_partitions(self.state.costs):
                self._add(stages)
        while self._heap and self.state.elapsed < end and not self.state.done:
            floor, _, stages, caps = heappop(self._heap)
            if not self._promises(floor):
                return
            self._offer_cycles(stages, caps)
            for neighbour in _neighbours(stages, self.state.costs.gpus if alike else 0):
                self._add(neighbour)

    def _starts(self) -> Iterator[Stages]:
        """Partitions that suit periods from the contiguous bound up to the best plan's."""
        costs, most = self.state.costs, self.state.most_in_flight
        solvers = [ContiguousSolver(costs, most, any_k=relaxed) for relaxed in (True, False)]
        low = max(1, int(self.state.bounds.get("contiguous", Fraction(1))))
        best = self.state.best
        high = max(low, int(best.per_microbatch) if best else solvers[0].serial_ns)
        for solver in solvers:
            for point in range(PERIODS + 1):
                partition = solver.solve(low + (high - low) * point // PERIODS)
                if partition is not None:
                    yield partition.stages

    def _promises(self, floor: Fraction) -> bool:
        """Whether a partition with this floor could be better than the best plan."""
        return self.state.best is None or floor < self.state.best.per_microbatch

    def _add(self, stages: Stages) -> None:
        """Queue a partition once, if it fits and could be better than the best plan."""
        if stages in self._seen or not self.state.costs.keeps_pins(stages):
            return
        self._seen.add(stages)
        caps = _caps(self.state.costs, stages, self.state.most_in_flight)
        if caps is None:
            return
        floor = _floor(self.state.costs, stages, caps)
        if self._promises(floor):
            heappush(self._heap, (floor, next(self._number), stages, caps))

    def _offer_cycles(self, stages: Stages, caps: tuple[int, ...]) -> None:
        """Offer what eager execution of the partition settles into, for several caps."""
        ops = chain_ops(stages)
        steps = steps_of(self.state.costs, stages)
        for fewer in dict.fromkeys(_variants(caps)):
            if not self._promises(_floor(self.state.costs, stages, fewer)):
                continue
            for order in ORDERS:
                cycle = eager_cycle(steps, fewer, order, microbatches=4 * MAX_K)
                if cycle is None or not self._allows(cycle.k):
                    continue
                times = dict(zip(ops, cycle.times, strict=True))
                schedule = Schedule(stages, cycle.period, cycle.k, times)
                if self._promises(schedule.per_microbatch):
                    self.state.offer(schedule)

    def _allows(self, k: int) -> bool:
        ks = self.state.options.ks
        return k <= MAX_K and (len(ks) > 1 or ks[0] % k == 0)


def steps_of(costs: Costs, stages: Stages) -> list[Step]:
    """The ops of one micro-batch in chain order."""
    return [
        Step(*op, resource(costs, stages, op), duration(costs, stages, op))
        for op in chain_ops(stages)
    ]


def _caps(costs: Costs, stages: Stages, most: int | None) -> tuple[int, ...] | None:
    """Per stage, how many micro-batches its GPU can hold; None if not one.

    A stage gets no more than two per stage of the pipeline, nor more than the one before it.
    """
    caps: list[int] = []
    for stage in stages:
        useful = min([2 * len(stages), *caps[-1:]])
        kept = most_kept(costs, stage, most)
        if kept == 0:
            return None
        caps.append(useful if kept is None else min(useful, kept))
    return tuple(caps)


def most_kept(costs: Costs, stage: Stage, most: int | None) -> int | None:
    """How many micro-batches a stage alone on its GPU can hold, whatever the order of its ops.

    When it holds most it has begun the last of them, and its next op is a backward: there was
    room for all but one beside a forward, and for all beside a backward.

    Args:
        costs: Bytes, and what the GPU has.
        stage: The only one on its GPU.
        most: No stage may hold more (R6); None for no limit.

    Returns:
        The number, 0 if there is no room for one, None if there is no limit.
    """
    size = costs.segment(stage.first, stage.last)
    own = max(size.running, size.saved + size.backward)
    room = costs.budgets[stage.gpu] - size.states - own - _slots(costs, stage)
    if room < 0:
        return 0
    kept = 1 + room // size.saved if size.saved else None
    return most if kept is None else min(kept, most or kept)


def _slots(costs: Costs, stage: Stage) -> int:
    """Bytes of the permanent buffers of both ends (P5); the exact model's messages come and go."""
    if costs.exact:
        return 0
    ends = [stage.first - 1, stage.last]
    inner = [layer for layer in ends if 0 <= layer < costs.layers - 1]
    return sum(2 * costs.tensor_bytes(layer, backward=False) for layer in inner)


def _floor(costs: Costs, stages: Stages, caps: tuple[int, ...]) -> Fraction:
    """The largest of the loads and of V(s) / cap(s): no eager cycle is shorter."""
    loads: dict[tuple[int, ...], int] = {}
    spans = [0] * len(stages)
    begun: list[int] = []
    now = 0
    for op in chain_ops(stages):
        length = duration(costs, stages, op)
        place = resource(costs, stages, op)
        loads[place] = loads.get(place, 0) + length
        if op[0] is OpKind.F:
            begun.append(now)
        now += length
        if op[0] is OpKind.B:
            spans[op[1]] = now - begun[op[1]]
    held = (Fraction(span, cap) for span, cap in zip(spans, caps, strict=True))
    return max(Fraction(max(loads.values())), *held)


def _variants(caps: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The caps; one less in each stage alone; a limit for the input: messages need room as well.

    With a limit for the input and nothing else, or one less in each stage, what fits in memory at
    all is among these: no stage then holds more than its cap.
    """
    yield caps
    yield tuple(max(1, cap - 1) for cap in caps)
    for most in range(caps[0], 0, -1):
        yield tuple(min(cap, most) for cap in caps)
        yield tuple(map(min, caps, staircase(len(caps), most)))
    for index, cap in enumerate(caps):
        if cap > 1:
            yield (*caps[:index], cap - 1, *caps[index + 1 :])


def _neighbours(stages: Stages, gpus: int) -> Iterator[Stages]:
    """Partitions with one border moved by one layer, removed, or (up to `gpus` stages) added.

    Args:
        stages: one per GPU.
        gpus: how many GPUs may be used where they are all alike; 0 keeps the stages' GPUs.
    """
    cuts = [stage.first for stage in stages[1:]]
    end = stages[-1].last + 1
    for index, cut in enumerate(cuts):
        for moved in (cut - 1, cut + 1):
            others = [0, *cuts[:index], *cuts[index + 1 :], end]
            if 0 < moved < end and moved not in others:
                yield _stages(sorted([*cuts[:index], moved, *cuts[index + 1 :]]), end, stages)
    if not gpus:
        return
    for index in range(len(cuts)):
        yield _stages(cuts[:index] + cuts[index + 1 :], end)
    if len(stages) < gpus:
        for stage in stages:
            for cut in range(stage.first + 1, stage.last + 1):
                yield _stages(sorted([*cuts, cut]), end)


def _all_partitions(costs: Costs) -> Iterator[Stages]:
    """Every partition into at most one stage a GPU, if there are few of them."""
    most = min(costs.gpus, costs.layers)
    if sum(comb(costs.layers - 1, cuts) for cuts in range(most)) > FEW:
        return
    for number in range(most):
        for cuts in combinations(range(1, costs.layers), number):
            yield _stages(list(cuts), costs.layers)


def _stages(cuts: list[int], end: int, like: Stages | None = None) -> Stages:
    """Stages between `cuts`, on the GPUs of `like` or on the first ones."""
    borders = [0, *cuts, end]
    return tuple(
        Stage(id=i, layers=(a, b - 1), gpu=like[i].gpu if like else i)
        for i, (a, b) in enumerate(pairwise(borders))
    )
