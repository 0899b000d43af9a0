"""Simulated annealing over allocations, each judged by one list schedule.

At a period a little below the best plan's, list scheduling judges an allocation in some ten
microseconds; the bytes by which it overflows the GPUs' memories are the energy. Simulated
annealing (Kirkpatrick, Gelatt, Vecchi 1983) drives that violation to zero, then the period is
lowered. `allocation_walk` makes the steps; what fits as far as it can tell is judged here, by
exact bytes. The moves are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import inf
from random import Random
from typing import ClassVar, Final, Protocol

import numpy as np

from pipeplan.ilp.compiled import Floats
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.cycle_ratio import minimize_period_for_order
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.local_search.allocation import Allocation
from pipeplan.ilp.local_search.allocation_walk import AllocationWalk, kept
from pipeplan.ilp.local_search.list_scheduler import ModuloListScheduler, PlacedStage, overload
from pipeplan.ilp.memory import memory_rows
from pipeplan.ilp.schedule import Schedule

ROUND: Final = 1500
"""Steps from hot to cold."""
TARGET_REDUCTIONS: Final = (0.02, 0.01, 0.005, 0.002, 0.0005)
"""By how much a round tries to shorten the period."""
LARGE_TARGET_REDUCTIONS: Final = (0.2, 0.1, 0.05)
"""The same while the bound allows it: where memory is scarce, plans lie far from each other."""
INITIAL_TEMPERATURE: Final = 0.03
"""Excess, as a share of a GPU's memory, that a hot step accepts with probability 1/e."""
STEP_S: Final = 2e-6
"""What a step counts for where work is counted instead of time, beside its list schedule."""
PLACED_S: Final = 1.2e-6
"""What each copy of a stage counts for that it places."""
JUDGED_S: Final = 1e-4
"""What an allocation counts for that is judged by the bytes of its plan."""
AT_ONCE: Final = 100
"""Steps between two looks at the clock, at most."""
COLD: Final = 1e-9
"""Added to every temperature: the last ones are next to nothing."""


class Walk(Protocol):
    """Steps from allocation to allocation at one period, as `AllocationWalk` makes them."""

    @property
    def waits(self) -> bool:
        """Whether a step came to `new` that waits until it is `judged`."""
        ...

    @property
    def new(self) -> Allocation:
        """What the last step came to."""
        ...

    @property
    def closest(self) -> tuple[float, Allocation]:
        """The least excess since the beginning, and the allocation that has it."""
        ...

    def begin(self, layout: Allocation, excess: float, period: int) -> None:
        """Go on from an allocation that is so far from a plan, at a period of all copies in ns."""
        ...

    def run(self, heats: Floats) -> tuple[int, int]:
        """Make steps; how many are done, and how many copies of stages were placed."""
        ...

    def judged(self, excess: float) -> None:
        """The allocation `new` is so far from a plan."""
        ...


@dataclass
class SimulatedAnnealing:
    """Annealing rounds from the best plan, until the time is over."""

    state: Incumbent
    reductions: ClassVar[tuple[float, ...]] = (*LARGE_TARGET_REDUCTIONS, *TARGET_REDUCTIONS)
    name: ClassVar[str] = "annealing"
    judged_s: ClassVar[float] = JUDGED_S
    random: Random = field(init=False)
    draws: np.random.Generator = field(init=False)
    """What steps draw from."""
    _best: Schedule = field(init=False)
    """The shortest schedule that fits; the state may prefer another under flush."""

    def __post_init__(self) -> None:
        """Repeatable for a seed."""
        self.random = self.state.random(self.name)
        self.draws = np.random.default_rng(self.random.getrandbits(64))
        self.state.note_missing_compiler()

    @cached_property
    def _allocations(self) -> Walk:
        return AllocationWalk(self.state.costs, self.draws)

    def _walk_from(self, layout: Allocation) -> Walk:
        """What makes steps from an allocation on."""
        return self._allocations

    def run(self, seconds: float) -> None:
        """Anneal for `seconds` from the best plan so far, if there is one."""
        state, best = self.state, self._known()
        if best is None or state.costs.gpus == 1:
            return
        self._best = best
        end = state.elapsed + min(seconds, state.remaining)
        state.set_phase(self.name)
        while not self._over(end) and self._target(TARGET_REDUCTIONS[-1]) >= state.bound:
            self._round(end)

    def _known(self) -> Schedule | None:
        """The best plan so far."""
        return self.state.best

    def _begin(self, k: int) -> Allocation:
        """What the best plan does, with k copies."""
        return Allocation.of(self._best, k)

    def _over(self, end: float) -> bool:
        return self.state.done or self.state.elapsed >= end

    @property
    def _closed(self) -> bool:
        """Whether the gap asked for is reached."""
        return self.state.closed

    def anneal_from(
        self,
        layout: Allocation,
        target: Fraction,
        steps: int,
        end: float,
        shrink: float = TARGET_REDUCTIONS[-1],
        temperature: float = INITIAL_TEMPERATURE,
    ) -> tuple[float, Allocation]:
        """Anneal from an allocation that may not fit yet, at a period below the best plan's.

        Args:
            layout: Where to begin.
            target: Nanoseconds per micro-batch.
            steps: From hot to cold.
            end: When to stop, by the search's clock.
            shrink: By how much the target is below a plan found on the way.
            temperature: Excess that a step accepts with probability 1/e at first.

        Returns:
            The least excess on the way and the allocation that had it: 0 where annealing found a
            plan, infinite where there is no best plan to be shorter than.
        """
        best = self._known()
        if best is None:
            return inf, layout
        self._best = best
        layout = kept(self.state.costs, layout, self.random.random())
        return self._anneal(layout, target, steps, shrink, end, temperature)

    def _round(self, end: float) -> None:
        """One round from hot to cold around the best plan."""
        shrink = self.random.choice(self.reductions)
        at = self._begin(self._choose_k())
        self._anneal(at, self._target(shrink), ROUND, shrink, end)

    def _anneal(
        self,
        at: Allocation,
        target: Fraction,
        steps: int,
        shrink: float,
        end: float,
        temperature: float = INITIAL_TEMPERATURE,
    ) -> tuple[float, Allocation]:
        """From hot to cold; a plan found makes the target shorter on the way, by `shrink`.

        Returns:
            As `anneal_from`.
        """
        clock, step = self.state.options.clock, 0
        closest, walk = (self._excess(at, target), at), self._walk_from(at)
        if closest[0] > 0:
            walk.begin(at, closest[0], self._period(at, target))
        else:
            target = self._shorten(walk, at, shrink)
        heats = temperature * (1 - np.arange(steps) / steps) + COLD
        end = min(end, self.state.options.time_limit_s)
        while step < steps and clock.spent < end:
            if self._closed or target < self.state.bound:
                break
            done, placed = walk.run(heats[step : step + AT_ONCE])
            clock.charge(done * STEP_S + placed * PLACED_S)
            step += done
            if walk.waits:
                new = walk.new
                excess = self._excess(new, target)
                walk.judged(excess)
                if excess <= 0:
                    closest, target = (excess, new), self._shorten(walk, new, shrink)
        return min(closest, walk.closest, key=lambda one: one[0])

    def _shorten(self, walk: Walk, layout: Allocation, shrink: float) -> Fraction:
        """Walk on from the allocation of a plan, at a shorter period."""
        target = self._target(shrink)
        walk.begin(layout, self._excess(layout, target), self._period(layout, target))
        return target

    def _period(self, layout: Allocation, target: Fraction) -> int:
        """Nanoseconds of all copies."""
        return max(1, len(layout.turns) * target.numerator // target.denominator)

    def _choose_k(self) -> int:
        """Mostly one or as many as the best plan has; of the others that are allowed, small ones.

        Longer cycles cost more time a step.
        """
        ks = self.state.options.ks
        likely = [k for k in (1, self._best.k) if k in ks or len(ks) > 1]
        if likely and self.random.random() < 0.7:
            return self.random.choice(likely)
        return self.random.choices(ks, [1 / k for k in ks])[0]

    def _target(self, shrink: float) -> Fraction:
        return self._best.per_microbatch * (1 - Fraction(shrink))

    def _excess(self, layout: Allocation, target: Fraction) -> float:
        """How far from a plan at this period: bytes beyond memory; without a schedule, above 1.

        A schedule that fits is offered, as early and as short as its orders allow.
        """
        self.state.options.clock.charge(self.judged_s)
        costs, runs = self._seen(layout)
        copies, period = len(layout.turns), self._period(layout, target)
        over = overload(costs, runs, period, copies)
        if over > 0:
            return 2 + over
        centres = [int(turn * period) for turn in layout.turns]
        waits = layout.waits_by_stage(period) if layout.waits else {}
        placing = ModuloListScheduler(costs, runs, period, centres, waits)
        found = placing.place()
        self.state.options.clock.charge(PLACED_S * placing.placed * copies)
        if not found:
            return 2 - placing.placed / (len(runs) + 1)
        excess = self._beside(costs, placing)
        return excess or self._take(costs, placing.schedule())

    def _seen(self, layout: Allocation) -> tuple[CostModel, Sequence[PlacedStage]]:
        """The chain whose layers are placed, and the stages in layers of it."""
        return self.state.costs, layout.runs

    def _beside(self, costs: CostModel, placing: ModuloListScheduler) -> float:
        """Estimated bytes beyond memory, as shares of each GPU's, summed."""
        return memory_overflow(placing.peaks(), costs.budgets)

    def _take(self, costs: CostModel, schedule: Schedule) -> float:
        """Offer a schedule, also as short as its orders allow; the share of exact bytes beyond.

        The shortest that fits is what the next target is measured by.
        """
        lowest = self.state.lowest_period(schedule.k)
        fits = False
        for each in (schedule, minimize_period_for_order(costs, schedule, lowest)):
            if self._offer(costs, each):
                fits |= each is schedule
                if each.per_microbatch < self._best.per_microbatch:
                    self._best = each
        if fits:
            return 0.0
        peaks = [row.peak_bytes for row in memory_rows(costs, schedule)]
        return memory_overflow(peaks, costs.budgets)

    def _offer(self, costs: CostModel, schedule: Schedule) -> bool:
        """Whether a schedule of the layers of `costs` fits; the best one is kept."""
        assert costs is self.state.costs
        return self.state.offer(schedule)


def memory_overflow(peaks: Sequence[int], budgets: Sequence[int]) -> float:
    """Bytes beyond memory, as shares of each GPU's, summed."""
    pairs = zip(peaks, budgets, strict=True)
    return sum(peak / max(1, budget) - 1 for peak, budget in pairs if peak > budget)
