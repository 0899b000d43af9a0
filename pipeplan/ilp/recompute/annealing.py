"""Simulated annealing over allocations that also changes what stages recompute.

It extends `local_search.annealing`. An allocation names layers of the chain as it is and the
recomputed segments ("runs") among them. A step moves a cut or a stage, or changes the runs of a
stage (`local_search.run_moves`). Runs end at their stage's cuts. What fits as far as the walk can
tell is judged on its contracted chain, so that the judgement is exact. Runs in runs have a walk of
their own. Source: ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Final

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.local_search.allocation import Allocation
from pipeplan.ilp.local_search.allocation_walk import AllocationWalk
from pipeplan.ilp.local_search.annealing import (
    TARGET_REDUCTIONS,
    SimulatedAnnealing,
    Walk,
    memory_overflow,
)
from pipeplan.ilp.local_search.list_scheduler import ModuloListScheduler, PlacedStage
from pipeplan.ilp.offload.relief_estimate import estimate_relief
from pipeplan.ilp.recompute.contracted_chain import ContractedChain
from pipeplan.ilp.recompute.contraction_cache import ContractionCache, clip_to_stages
from pipeplan.ilp.recompute.joint_incumbent import JointIncumbent
from pipeplan.ilp.recompute.nested_walk import NestedWalk
from pipeplan.ilp.recompute.options import StageOptions
from pipeplan.ilp.schedule import Schedule

JUDGED_S: Final = 3e-4
"""What an allocation counts for that is judged by its plan: most contract a chain."""


class RecomputeAnnealing(SimulatedAnnealing):
    """Annealing rounds from the best plan of all, over allocations and runs."""

    name = "recompute annealing"
    reductions = TARGET_REDUCTIONS
    judged_s = JUDGED_S

    def __init__(self, joint: JointIncumbent, offered: StageOptions | None) -> None:
        """Repeatable for a seed; `offered` is for plans with runs in runs."""
        super().__init__(joint.state)
        self.joint, self.pieces = joint, ContractionCache(joint.state.costs)
        self._contracted: ContractedChain | None = None
        self._nested = NestedWalk(joint.state.costs, offered, self.random, self.draws)

    @cached_property
    def _allocations(self) -> Walk:
        costs, offload = self.state.costs, self.state.options.offload
        host = costs.cluster.host if offload else None
        return AllocationWalk(costs, self.draws, recompute=True, host=host)

    def _walk_from(self, layout: Allocation) -> Walk:
        nested = any(run.inner for run in layout.recompute)
        return self._nested if nested else self._allocations

    def _known(self) -> Schedule | None:
        return self.joint.best.state.best

    def _begin(self, k: int) -> Allocation:
        return allocation_of(self.joint, k)

    @property
    def _closed(self) -> bool:
        """Whether the joint search wants nothing more; its state has no plan of its own."""
        return self.joint.closed

    def _over(self, end: float) -> bool:
        return self.joint.done or self.state.elapsed >= end

    def _seen(self, layout: Allocation) -> tuple[CostModel, Sequence[PlacedStage]]:
        """The contracted chain, and the stages in its layers."""
        contracted, costs = self.pieces.of(clip_to_stages(layout.recompute, layout.segments()))
        self._contracted = contracted
        return costs, contracted.renumbered(layout.runs)

    def _beside(self, costs: CostModel, placing: ModuloListScheduler) -> float:
        """As `SimulatedAnnealing` counts, less what may be offloaded."""
        peaks = placing.peaks()
        if self.state.options.offload:
            over = [peak - budget for peak, budget in zip(peaks, costs.budgets, strict=True)]
            away = estimate_relief(costs, placing.runs, placing.times, placing.period, over)
            peaks = [peak - size for peak, size in zip(peaks, away, strict=True)]
        return memory_overflow(peaks, costs.budgets)

    def _offer(self, costs: CostModel, schedule: Schedule) -> bool:
        assert self._contracted is not None
        return self.joint.offer(self._contracted, costs, schedule)


def allocation_of(joint: JointIncumbent, k: int) -> Allocation:
    """The best plan's allocation and runs, k copies evenly spread."""
    best = joint.best.state.best
    assert best is not None
    layout = Allocation.of(replace(best, stages=joint.best.stages), k)
    contracted = joint.best.contracted
    return replace(layout, recompute=tuple(sorted(contracted.runs)) if contracted else ())
