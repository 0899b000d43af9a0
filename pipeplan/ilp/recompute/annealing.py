"""Simulated annealing over allocations that also changes what stages recompute.

It extends `local_search.annealing`. An allocation names layers of the chain as it is and the
recomputed segments ("runs") among them. A step moves a cut or a stage, or changes the runs of a
stage: it takes those of another option, or adds, drops, shortens, splits or joins one. Runs end at
their stage's cuts. Each allocation is scheduled and judged on its contracted chain, so that the
judgement is exact. Source: ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from math import exp
from typing import Final

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.local_search.allocation import Allocation
from pipeplan.ilp.local_search.allocation_walk import stepped
from pipeplan.ilp.local_search.annealing import (
    COLD,
    INITIAL_TEMPERATURE,
    TARGET_REDUCTIONS,
    SimulatedAnnealing,
    memory_overflow,
)
from pipeplan.ilp.local_search.list_scheduler import ModuloListScheduler, PlacedStage
from pipeplan.ilp.offload.relief_estimate import estimate_relief
from pipeplan.ilp.recompute.contracted_chain import ContractedChain
from pipeplan.ilp.recompute.contraction_cache import ContractionCache, clip_to_stages
from pipeplan.ilp.recompute.joint_incumbent import JointIncumbent
from pipeplan.ilp.recompute.moves import mutate, options_of
from pipeplan.ilp.recompute.options import StageOptions
from pipeplan.ilp.runs import Runs, Segment
from pipeplan.ilp.schedule import Schedule

JUDGED_S: Final = 3e-4
"""What a step counts for where work is counted: most contract a chain."""
RECOMPUTE_SHARE: Final = 0.5
"""Share of the steps that change runs; the others change allocations."""


class RecomputeAnnealing(SimulatedAnnealing):
    """Annealing rounds from the best plan of all, over allocations and runs."""

    name = "recompute annealing"
    reductions = TARGET_REDUCTIONS
    judged_s = JUDGED_S

    def __init__(self, joint: JointIncumbent, offered: StageOptions) -> None:
        """Repeatable for a seed."""
        super().__init__(joint.state)
        self.joint, self.offered = joint, offered
        self.pieces = ContractionCache(joint.state.costs)
        self._contracted: ContractedChain | None = None
        self._sets: dict[Segment, list[Runs]] = {}

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
            peaks = offloaded_overflow(costs, placing, peaks)
        return memory_overflow(peaks, costs.budgets)

    def _offer(self, costs: CostModel, schedule: Schedule) -> bool:
        assert self._contracted is not None
        return self.joint.offer(self._contracted, costs, schedule)

    def _anneal(
        self,
        at: Allocation,
        target: Fraction,
        steps: int,
        shrink: float,
        end: float,
        temperature: float = INITIAL_TEMPERATURE,
    ) -> tuple[float, Allocation]:
        """As `SimulatedAnnealing` does, step by step: each has a contracted chain of its own."""
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
            heat = temperature * (1 - step / steps) + COLD
            if found <= excess or self.random.random() < exp((excess - found) / heat):
                at, excess = new, found
                if excess < closest[0]:
                    closest = excess, at
            if excess <= 0:
                target = self._target(shrink)
                excess = self._excess(at, target)
        return closest

    def _step(self, layout: Allocation) -> Allocation:
        """Other runs in a stage, or an allocation changed."""
        if self.random.random() > RECOMPUTE_SHARE:
            return stepped(self.state.costs, layout, self.draws)
        stages = layout.segments()
        stage = self.random.choice(stages)
        runs = clip_to_stages(layout.recompute, stages)
        offered, options = self._offered(stage), options_of(self.state.costs.chain, stage)
        return replace(layout, recompute=mutate(self.random, runs, stage, offered, options))

    def _offered(self, stage: Segment) -> Sequence[Runs]:
        """The sets of runs that the options of a segment stand for."""
        if stage not in self._sets:
            used = range(self.offered.counts[stage])
            self._sets[stage] = [self.offered.runs(*stage, number) for number in used]
        return self._sets[stage]


def offloaded_overflow(
    costs: CostModel, placed: ModuloListScheduler, peaks: Sequence[int]
) -> list[int]:
    """Peaks of a placement, less what its stages may offload, at a glance."""
    over = [peak - budget for peak, budget in zip(peaks, costs.budgets, strict=True)]
    away = estimate_relief(costs, placed.runs, placed.times, placed.period, over)
    return [peak - size for peak, size in zip(peaks, away, strict=True)]


def allocation_of(joint: JointIncumbent, k: int) -> Allocation:
    """The best plan's allocation and runs, k copies evenly spread."""
    best = joint.best.state.best
    assert best is not None
    layout = Allocation.of(replace(best, stages=joint.best.stages), k)
    contracted = joint.best.contracted
    return replace(layout, recompute=tuple(sorted(contracted.runs)) if contracted else ())
