"""Load balancing (`local_search.balancing`) in which layers may be recomputed.

One assignment annealing finds the allocation and the recomputed layers together under estimated
counts of micro-batches in flight. Neighbouring recomputed layers of a stage may form one run: a
run keeps one input and needs room for all its layers while it is recomputed. So runs of several
lengths are tried, and the allocation that overflows by the fewest bytes is kept. Annealing goes on
from what fits nearly. Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from pipeplan.ilp.local_search.allocation import Allocation
from pipeplan.ilp.local_search.annealing import memory_overflow
from pipeplan.ilp.local_search.assignment_annealing import AssignmentAnnealing
from pipeplan.ilp.local_search.balancing import (
    BalanceAndSchedule,
    Estimate,
    ScheduledAllocation,
    measured_estimate,
)
from pipeplan.ilp.local_search.list_scheduler import ModuloListScheduler
from pipeplan.ilp.memory import memory_rows
from pipeplan.ilp.offload.relief_estimate import estimate_relief
from pipeplan.ilp.recompute.annealing import RecomputeAnnealing, allocation_of
from pipeplan.ilp.recompute.assignment_annealing import (
    KEPT,
    OPTIONS,
    RECOMPUTED,
    RecomputeAssignmentAnnealing,
)
from pipeplan.ilp.recompute.contracted_chain import ContractedChain
from pipeplan.ilp.recompute.contraction_cache import clip_to_stages
from pipeplan.ilp.recompute.joint_incumbent import JointIncumbent
from pipeplan.ilp.recompute.moves import ways
from pipeplan.ilp.runs import Run, Runs, Segment
from pipeplan.ilp.schedule import Schedule
from pipeplan.plan import MemoryRow

STEPS: Final = 100
"""Steps for each unit in a round at first: what fits nearly is where annealing starts."""
LENGTHS: Final = (1, 2, 3, 2**30)
"""Most layers of a run that are tried."""


class RecomputeBalancing(BalanceAndSchedule):
    """As `BalanceAndSchedule`, from the best plan of all contracted chains."""

    name = "recompute balancing"

    def __init__(self, joint: JointIncumbent, annealing: RecomputeAnnealing) -> None:
        """Repeatable for a seed."""
        super().__init__(joint.state, annealing)
        self.joint, self._pieces, self._steps = joint, annealing.pieces, STEPS
        self._variants = [self._pieces.of(runs)[1] for runs in ways(joint.state.costs.chain)]

    def _best(self) -> Schedule | None:
        return self.joint.best.state.best

    def _over(self, end: float) -> bool:
        return self.joint.done or self.state.elapsed >= end

    def _begin(self, period: int) -> Estimate:
        layout, best = allocation_of(self.joint, 1), self._best()
        assert best is not None
        contracted, costs = self._pieces.of(layout.recompute)
        counts, beside = measured_estimate(costs, best, period)
        return Estimate(layout, spread(contracted, counts), beside)

    def _balance(self, period: int, guess: Estimate, price: float) -> AssignmentAnnealing:
        chosen = [KEPT] * self.state.costs.layers
        for run in guess.layout.recompute:
            way = RECOMPUTED if run.option is None else OPTIONS + run.option
            chosen[run.first : run.last + 1] = [way] * (run.last + 1 - run.first)
        return RecomputeAssignmentAnnealing(
            self.state.costs, self._variants, period, guess, chosen, price
        )

    def _layout(self, balance: AssignmentAnnealing) -> Allocation:
        assert isinstance(balance, RecomputeAssignmentAnnealing)
        runs = tuple(
            Run(layer, layer, None if way == RECOMPUTED else way - OPTIONS)
            for layer, way in enumerate(balance.chosen)
            if way != KEPT
        )
        return Allocation(balance.homes, frozenset(), recompute=runs)

    def _scheduled(self, layout: Allocation, period: int) -> ScheduledAllocation | None:
        best, found = self._best(), list[ScheduledAllocation]()
        assert best is not None
        if period >= best.per_microbatch:
            return None
        for runs in joined(layout.recompute, layout.segments()):
            contracted, costs = self._pieces.of(runs)
            placing = ModuloListScheduler(costs, contracted.renumbered(layout.runs), period)
            if placing.place():
                found.append(
                    ScheduledAllocation(replace(layout, recompute=runs), costs, placing.schedule())
                )
        return min(found, key=self._excess, default=None)

    def _excess(self, placed: ScheduledAllocation) -> float:
        """As `BalanceAndSchedule` counts, less what may be offloaded."""
        if not self.state.options.offload:
            return super()._excess(placed)
        rows = memory_rows(placed.costs, placed.schedule)
        away = self._away(placed, rows)
        peaks = [row.peak_bytes - size for row, size in zip(rows, away, strict=True)]
        return memory_overflow(peaks, placed.costs.budgets)

    def _away(self, placed: ScheduledAllocation, rows: Sequence[MemoryRow]) -> list[int]:
        """What each GPU's stages may offload, as far as it needs that by its row."""
        costs, schedule = placed.costs, placed.schedule
        over = [row.peak_bytes - row.budget_bytes for row in rows]
        stages = [(stage.first, stage.last, stage.gpu) for stage in schedule.stages]
        return estimate_relief(costs, stages, schedule.times, schedule.period, over)

    def _measured(
        self, placed: ScheduledAllocation, period: int
    ) -> tuple[list[float], list[float]]:
        contracted, _ = self._pieces.of(placed.layout.recompute)
        counts, beside = measured_estimate(placed.costs, placed.schedule, period)
        if self.state.options.offload:
            rows = memory_rows(placed.costs, placed.schedule)
            away = zip(beside, self._away(placed, rows), placed.costs.budgets, strict=True)
            beside = [share - size / max(1, budget) for share, size, budget in away]
        return spread(contracted, counts), beside

    def _take(self, placed: ScheduledAllocation, schedule: Schedule) -> bool:
        contracted, costs = self._pieces.of(placed.layout.recompute)
        return self.joint.offer(contracted, costs, schedule)


def spread(contracted: ContractedChain, counts: Sequence[float]) -> list[float]:
    """By layer of the chain as it is: what is known by layer of the contracted one."""
    pieces = zip(contracted.pieces, counts, strict=True)
    return [count for (first, last), count in pieces for _ in range(first, last + 1)]


def joined(single: Runs, stages: Sequence[Segment]) -> Iterator[Runs]:
    """Runs of the same layers, of at most so many layers each, within stages; each set once.

    Layers under an option stay alone.
    """
    seen: set[Runs] = set()
    for most in LENGTHS:
        runs: list[Run] = []
        for one in single:
            if runs and one.option is None and _follows(runs[-1], one.first, most):
                runs[-1] = Run(runs[-1].first, one.first)
            else:
                runs.append(one)
        found = clip_to_stages(runs, stages)
        if found not in seen:
            seen.add(found)
            yield found


def _follows(run: Run, layer: int, most: int) -> bool:
    """Whether a run that is recomputed may take `layer`, too."""
    return run.option is None and run.last == layer - 1 and layer - run.first < most
