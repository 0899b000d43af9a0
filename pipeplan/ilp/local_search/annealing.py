"""Simulated annealing over allocations, each judged by one list schedule.

At a period a little below the best plan's, `list_scheduler` schedules an allocation in a fraction
of a millisecond; the bytes by which it overflows the GPUs' memories are the energy. Simulated
annealing (Kirkpatrick, Gelatt, Vecchi 1983) drives that violation to zero, then the period is
lowered. Where memory is scarce it finds more than CP-SAT's models do, because one step costs a
thousandth of one of theirs. The moves are ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from math import exp, inf
from random import Random
from typing import ClassVar, Final

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.cycle_ratio import minimize_period_for_order
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.local_search.allocation import Allocation, Waits
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
STEP_S: Final = 4e-5
"""What a step counts for where work is counted instead of time, beside its list schedule."""
PLACED_S: Final = 3.5e-6
"""What each copy of a stage counts for that it places."""
WAITING: Final = 0.3
"""Share of the changes that let a stage wait, or no longer."""
LONGEST_WAIT: Final = 0.5
"""In periods."""


@dataclass
class SimulatedAnnealing:
    """Annealing rounds from the best plan, until the time is over."""

    state: Incumbent
    reductions: ClassVar[tuple[float, ...]] = (*LARGE_TARGET_REDUCTIONS, *TARGET_REDUCTIONS)
    name: ClassVar[str] = "annealing"
    step_s: ClassVar[float] = STEP_S
    random: Random = field(init=False)
    _best: Schedule = field(init=False)
    """The shortest schedule that fits; the state may prefer another under flush."""

    def __post_init__(self) -> None:
        """Repeatable for a seed."""
        self.random = self.state.random(self.name)
        self.state.note_missing_compiler()

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
        return self._anneal(self._kept(layout), target, steps, shrink, end, temperature)

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
        excess = self._excess(at, target)
        closest = excess, at
        options, known = self.state.options, None
        for step in range(steps):
            # Steps charge what they do, and only plans change what is left to do: looks are free.
            if options.clock.spent >= min(end, options.time_limit_s):
                break
            if self._best is not known:
                if self._closed or target < self.state.bound:
                    break
                known = self._best
            new = self._step(at)
            found = self._excess(new, target)
            heat = temperature * (1 - step / steps) + 1e-9
            if found <= excess or self.random.random() < exp((excess - found) / heat):
                at, excess = new, found
                if excess < closest[0]:
                    closest = excess, at
            if excess <= 0:
                target = self._target(shrink)
                excess = self._excess(at, target)
        return closest

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
        self.state.options.clock.charge(self.step_s)
        costs, runs = self._seen(layout)
        copies = len(layout.turns)
        period = max(1, copies * target.numerator // target.denominator)
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

    def _step(self, layout: Allocation) -> Allocation:
        """One or two random changes."""
        for _ in range(2 if self.random.random() < 0.3 else 1):
            layout = self._change(layout)
        return self._kept(layout)

    def _kept(self, layout: Allocation) -> Allocation:
        """The layout with tied layers where one of theirs is, pinned ones on their GPUs."""
        costs = self.state.costs
        if not costs.tied_groups and not costs.pins:
            return layout
        homes = list(layout.homes)
        for group in costs.tied_groups:
            gpu = homes[self.random.choice(group)]
            for layer in group:
                homes[layer] = gpu
        given = (
            new if pin is None else pin for new, pin in zip(homes, costs.pinned_gpus, strict=True)
        )
        return replace(layout, homes=tuple(given))

    def _change(self, layout: Allocation) -> Allocation:
        """Move a border, a run of layers or a whole stage; swap two; split, join; shift; wait."""
        draw, runs = self.random.random(), layout.runs
        if self.random.random() < WAITING:
            return replace(layout, waits=self._waiting(layout, runs))
        if len(layout.turns) > 1 and draw < 0.1:
            return replace(layout, turns=self._shifted(layout.turns))
        homes = list(layout.homes)
        if draw < 0.45 and len(runs) > 1:
            self._move_border(runs, homes)
        elif draw < 0.72:
            begin, end, _ = self.random.choice(runs)
            first = self.random.randint(begin, end)
            last = min(end, first + self.random.choice((0, 0, 1, 2, 4, 8)))
            _assign(homes, first, last, self.random.randrange(self.state.costs.gpus))
        elif draw < 0.82:
            first, last, _ = self.random.choice(runs)
            _assign(homes, first, last, self.random.randrange(self.state.costs.gpus))
        elif draw < 0.9:
            one, other = self.random.choice(runs), self.random.choice(runs)
            _assign(homes, one[0], one[1], other[2])
            _assign(homes, other[0], other[1], one[2])
        else:
            return replace(layout, splits=self._resplit(layout))
        return replace(layout, homes=tuple(homes))

    def _move_border(self, runs: Sequence[PlacedStage], homes: list[int]) -> None:
        index = self.random.randrange(1, len(runs))
        (begin, _, before), (first, end, behind) = runs[index - 1 : index + 1]
        count = self.random.choice((1, 1, 1, 2, 3))
        if self.random.random() < 0.5:
            _assign(homes, first, min(end, first + count - 1), before)
        else:
            _assign(homes, max(begin, first - count), first - 1, behind)

    def _resplit(self, layout: Allocation) -> frozenset[int]:
        """Forget splits that do nothing or one of the others, or add one."""
        homes = layout.homes
        real = {layer for layer in layout.splits if homes[layer] == homes[layer - 1]}
        if real and self.random.random() < 0.5:
            return frozenset(real - {self.random.choice(sorted(real))})
        if len(homes) == 1:
            return frozenset()
        return frozenset(real | {self.random.randrange(1, len(homes))})

    def _waiting(self, layout: Allocation, runs: Sequence[PlacedStage]) -> Waits:
        """No wait for one of the stages that wait, or one for any stage, at its F or its B."""
        firsts = [first for first, _, _ in runs]
        kept = {first: layout.waits[first] for first in firsts if first in layout.waits}
        if kept and self.random.random() < 0.5:
            del kept[self.random.choice(list(kept))]
            return kept
        share = self.random.uniform(0, LONGEST_WAIT)
        wait = (share, 0.0) if self.random.random() < 0.5 else (0.0, share)
        return kept | {self.random.choice(firsts): wait}

    def _shifted(self, turns: tuple[float, ...]) -> tuple[float, ...]:
        copy = self.random.randrange(1, len(turns))
        moved = turns[copy] + self.random.uniform(-0.15, 0.15)
        return (0.0, *sorted([*turns[1:copy], min(max(moved, 0.0), 0.999), *turns[copy + 1 :]]))


def memory_overflow(peaks: Sequence[int], budgets: Sequence[int]) -> float:
    """Bytes beyond memory, as shares of each GPU's, summed."""
    pairs = zip(peaks, budgets, strict=True)
    return sum(peak / max(1, budget) - 1 for peak, budget in pairs if peak > budget)


def _assign(homes: list[int], first: int, last: int, gpu: int) -> None:
    homes[first : last + 1] = [gpu] * (last + 1 - first)
