"""Load balancing under estimated in-flight counts, corrected by schedules.

At a period between the bound and the best plan's, `assignment_annealing` finds an allocation whose
loads and estimated bytes fit; `list_scheduler` schedules it; the schedule's exact bytes say how
many micro-batches each layer really keeps and what else each GPU holds. With these figures the
allocation is balanced again, until a schedule fits. A few rounds suffice where memory leaves some
choice, also for hundreds of layers on dozens of GPUs, where judging every step by a schedule
(`annealing`) is slow. Source: ours; compare surrogate-assisted search.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Final

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.cycle_ratio import minimize_period_for_order
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.local_search.allocation import Allocation
from pipeplan.ilp.local_search.annealing import SimulatedAnnealing, memory_overflow
from pipeplan.ilp.local_search.assignment_annealing import AssignmentAnnealing
from pipeplan.ilp.local_search.list_scheduler import ModuloListScheduler
from pipeplan.ilp.memory import memory_rows
from pipeplan.ilp.schedule import Schedule
from pipeplan.plan import OpKind

STEPS: Final = 500
"""Steps for each unit in a round; twice as many when all shares of the gap were tried."""
STEP_S: Final = 1e-7
"""What a step counts for where work is counted instead of time."""
ROUNDS: Final = 16
"""Corrections at one period."""
FIRST: Final = 0.1
"""The first period lies so far from the bound to the best plan."""
FURTHER: Final = 1.6
"""Where nothing was found the next one lies so many times further."""
PRICE: Final = 0.02
"""Of a cut at first, in periods of load beyond the period."""
TOLERANCE: Final = 0.002
"""Overload from which on cuts get cheaper; below it they get dearer."""
CHEAPER: Final = 0.7
DEARER: Final = 1.2
SETTLED: Final = 4
"""Allocations that fit nearly at one period from which annealing goes on."""
SETTLING: Final = 1000
"""Its steps from each."""
BLEND: Final = 0.5
"""Weight of the last schedule's counts against those before."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Where layers sit; micro-batches each keeps on average; shares of memory beside them."""

    layout: Allocation
    counts: list[float]
    beside: list[float]


@dataclass(frozen=True, slots=True)
class ScheduledAllocation:
    """A layout's schedule; `costs` are of the layers that its stages name."""

    layout: Allocation
    costs: CostModel
    schedule: Schedule


class BalanceAndSchedule:
    """Periods between the bound and the best plan, tried until the time is over."""

    name = "balancing"

    def __init__(self, state: Incumbent, annealing: SimulatedAnnealing | None = None) -> None:
        """Repeatable for a seed; `annealing` anneals from what fits nearly."""
        self.state = state
        self.random = state.random(self.name)
        self._annealing = annealing or SimulatedAnnealing(state)
        self._steps = STEPS

    def run(self, seconds: float) -> None:
        """Shorten the best plan, ambitious periods first."""
        state = self.state
        end = state.elapsed + min(seconds, state.remaining)
        share = FIRST
        while not self._over(end):
            known = self._best()
            if known is None or state.costs.gpus == 1:
                return
            best, bound = known.per_microbatch, state.bound
            period = max(1, int(bound + (best - bound) * Fraction(share)))
            if period >= best or period < bound:
                return
            state.set_phase(f"{self.name}: {share:.0%} of the gap")
            if self._at(period, end):
                continue
            share *= FURTHER
            if share > 0.95:
                share, self._steps = FIRST, 2 * self._steps

    def _best(self) -> Schedule | None:
        return self.state.best

    def _over(self, end: float) -> bool:
        return self.state.done or self.state.elapsed >= end

    def _at(self, period: int, end: float) -> bool:
        """Whether a better plan of about this period was found."""
        best, begun = self._best(), self.state.elapsed
        guess, price = self._begin(period), PRICE
        near: list[tuple[float, int, Allocation]] = []
        for _ in range(ROUNDS):
            if self._over(end):
                return False
            balance = self._balance(period, guess, price)
            if balance.conflicting_pins:
                self.state.raise_bound("any", Fraction(period + 1), from_bytes=False)
                return False
            steps = self._steps * len(balance.units)
            balance.anneal(self.random, steps)
            self.state.options.clock.charge(steps * STEP_S)
            guess = replace(guess, layout=self._layout(balance))
            price *= CHEAPER if balance.overload > TOLERANCE else DEARER
            placed = self._scheduled(guess.layout, ceil(period * (1 + balance.overload)))
            if placed is None:
                continue
            if self._offer(placed):
                return self._best() is not best
            near.append((self._excess(placed), placed.schedule.period, placed.layout))
            guess = self._corrected(guess, placed, period)
        self._settle(near, min(end, 2 * self.state.elapsed - begun))
        return self._best() is not best

    def _begin(self, period: int) -> Estimate:
        """What the best plan does."""
        best = self.state.best
        assert best is not None
        return Estimate(Allocation.of(best, 1), *measured_estimate(self.state.costs, best, period))

    def _balance(self, period: int, guess: Estimate, price: float) -> AssignmentAnnealing:
        costs, homes = self.state.costs, guess.layout.homes
        return AssignmentAnnealing(costs, period, homes, guess.counts, guess.beside, price)

    def _layout(self, balance: AssignmentAnnealing) -> Allocation:
        return Allocation(balance.homes, frozenset())

    def _corrected(self, guess: Estimate, placed: ScheduledAllocation, period: int) -> Estimate:
        """The guess moved towards what a schedule really does."""
        new, beside = self._measured(placed, period)
        pairs = zip(new, guess.counts, strict=True)
        counts = [BLEND * one + (1 - BLEND) * other for one, other in pairs]
        return Estimate(guess.layout, counts, beside)

    def _measured(
        self, placed: ScheduledAllocation, period: int
    ) -> tuple[list[float], list[float]]:
        return measured_estimate(placed.costs, placed.schedule, period)

    def _excess(self, placed: ScheduledAllocation) -> float:
        """Bytes beyond memory, as shares of each GPU's, summed."""
        peaks = [row.peak_bytes for row in memory_rows(placed.costs, placed.schedule)]
        return memory_overflow(peaks, placed.costs.budgets)

    def _settle(self, near: list[tuple[float, int, Allocation]], end: float) -> None:
        """Anneal from the allocations that fit nearly, those that lack least first."""
        for _, period, layout in sorted(near, key=lambda row: row[:2])[:SETTLED]:
            if not self._over(end):
                self._annealing.anneal_from(layout, Fraction(period), SETTLING, end)

    def _scheduled(self, layout: Allocation, period: int) -> ScheduledAllocation | None:
        """A schedule of an allocation at this period, if that is worth it and one is found."""
        best = self._best()
        assert best is not None
        costs = self.state.costs
        placing = ModuloListScheduler(costs, layout.runs, period)
        if period >= best.per_microbatch or not placing.place():
            return None
        return ScheduledAllocation(layout, costs, placing.schedule())

    def _offer(self, placed: ScheduledAllocation) -> bool:
        """Whether the schedule fits; also as short as its orders allow."""
        lowest = self.state.lowest_period()
        early = minimize_period_for_order(placed.costs, placed.schedule, lowest)
        return any([self._take(placed, each) for each in (placed.schedule, early)])

    def _take(self, placed: ScheduledAllocation, schedule: Schedule) -> bool:
        """Whether a schedule of the same stages fits; the best one is kept."""
        return self.state.offer(schedule)


def measured_estimate(
    costs: CostModel, schedule: Schedule, period: int
) -> tuple[list[float], list[float]]:
    """What a schedule keeps of each layer on average at `period`, and each GPU's other bytes.

    Returns:
        Micro-batches by layer, and the share of each GPU's memory that its peak takes beyond the
        states and these counts of its layers.
    """
    counts: list[float] = []
    held = [0.0] * costs.gpus
    for stage in schedule.stages:
        length = costs.backward_ns(stage.first, stage.last, stage.gpu)
        begins, ends = (schedule.times[kind, stage.id] for kind in (OpKind.F, OpKind.B))
        stay = sum(end + length - begin for begin, end in zip(begins, ends, strict=True))
        count = stay / schedule.k / period
        for layer in range(stage.first, stage.last + 1):
            size = costs.segment(layer, layer, layer > 0)
            held[stage.gpu] += size.states + count * size.saved
            counts.append(count)
    peaks = (row.peak_bytes for row in memory_rows(costs, schedule))
    beside = [
        (peak - size) / max(1, budget)
        for peak, size, budget in zip(peaks, held, costs.budgets, strict=True)
    ]
    return counts, beside
