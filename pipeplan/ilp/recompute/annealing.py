"""The walk among allocations (`ilp.walk`) that also changes what stages compute again.

A layout names layers of the chain as it is and the runs among them; a step moves a border or a
stage as always, or changes the runs of a stage: those of another option, one added, kept,
shortened, parted, joined. Runs end at their stage's borders. Each layout is placed and judged on
its merged chain, so that all that follows is exact as elsewhere. Source: ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.local_search.annealing import ROUND, SHRINKS, Layout, Walk, beyond
from pipeplan.ilp.local_search.list_scheduler import Outward
from pipeplan.ilp.local_search.list_scheduler import Run as Placed
from pipeplan.ilp.local_search.peak_estimate import glance
from pipeplan.ilp.offload.relief_estimate import relief
from pipeplan.ilp.recompute.contracted_chain import Merged, Run
from pipeplan.ilp.recompute.contraction_cache import Pieces, within
from pipeplan.ilp.recompute.joint_incumbent import Joint
from pipeplan.ilp.recompute.moves import Runs, changed
from pipeplan.ilp.recompute.options import NONE, Options
from pipeplan.ilp.schedule import Schedule

AGAIN: Final = 0.5
"""Share of the steps that change runs; the others change allocations."""


@dataclass(frozen=True, slots=True)
class RunLayout(Layout):
    """An allocation of the chain's own layers, and the runs that are computed again."""

    again: Runs = ()

    def segments(self) -> list[Run]:
        """First and last layer of each stage."""
        return [(first, last) for first, last, _ in self.runs()]


class RunWalk(Walk):
    """Annealing rounds from the best plan of all, over allocations and runs."""

    def __init__(self, joint: Joint, offered: Options) -> None:
        """Repeatable for a seed."""
        super().__init__(joint.state)
        self.joint, self.offered = joint, offered
        self.pieces = Pieces(joint.state.costs)
        self._merged: Merged | None = None
        self._sets: dict[Run, list[Runs]] = {}

    def run(self, seconds: float) -> None:
        """Walk for `seconds` from the best plan so far, if there is one."""
        joint, state = self.joint, self.state
        if joint.best.state.best is None or state.costs.gpus == 1:
            return
        self._best = joint.best.state.best
        end = state.elapsed + min(seconds, state.remaining)
        state.set_phase("recompute annealing")
        while not self._over(end) and self._target(SHRINKS[-1]) >= state.bound:
            self._round(end)

    def settle(
        self,
        layout: Layout,
        target: Fraction,
        steps: int,
        end: float,
        shrink: float = SHRINKS[-1],
    ) -> None:
        """As `Walk` does, from a layout with runs."""
        best = self.joint.best.state.best
        if best is not None:
            self._best = best
            self._cool(layout, target, steps, shrink, end)

    def _over(self, end: float) -> bool:
        return self.joint.done or self.state.elapsed >= end

    def _round(self, end: float) -> None:
        shrink = self.random.choice(SHRINKS)
        at = layout_of(self.joint, self._choose_k())
        self._cool(at, self._target(shrink), ROUND, shrink, end)

    def _seen(self, layout: Layout) -> tuple[CostModel, list[Placed]]:
        """The merged chain, and the stages in its layers."""
        assert isinstance(layout, RunLayout)
        merged, costs = self.pieces.of(within(layout.again, layout.segments()))
        self._merged = merged
        return costs, merged.renumbered(layout.runs())

    def _beside(self, costs: CostModel, placing: Outward) -> float:
        """As `Walk` counts, less what may be away."""
        peaks = glance(costs, placing)
        if self.state.options.offload:
            peaks = relieved(costs, placing, peaks)
        return beyond(peaks, costs.budgets)

    def _offer(self, costs: CostModel, schedule: Schedule) -> bool:
        assert self._merged is not None
        return self.joint.offer(self._merged, costs, schedule)

    def _change(self, layout: Layout) -> Layout:
        assert isinstance(layout, RunLayout)
        if self.random.random() > AGAIN:
            return super()._change(layout)
        stages = layout.segments()
        stage = self.random.choice(stages)
        runs = within(layout.again, stages)
        again = changed(self.random, runs, stage, self._offered(stage))
        return replace(layout, again=again)

    def _offered(self, stage: Run) -> Sequence[Runs]:
        """The sets of runs that the options of a segment stand for."""
        if stage not in self._sets:
            used = int((self.offered.more[stage] < NONE).sum())
            self._sets[stage] = [self.offered.runs(*stage, number) for number in range(used)]
        return self._sets[stage]


def relieved(costs: CostModel, placed: Outward, peaks: Sequence[int]) -> list[int]:
    """Peaks of a placement, less what its stages may send to the host, at a glance."""
    over = [peak - budget for peak, budget in zip(peaks, costs.budgets, strict=True)]
    away = relief(costs, placed.runs, placed.times, placed.period, over)
    return [peak - size for peak, size in zip(peaks, away, strict=True)]


def layout_of(joint: Joint, k: int) -> RunLayout:
    """The best plan's allocation and runs, k copies evenly spread."""
    best = joint.best.state.best
    assert best is not None
    layout = RunLayout.of(replace(best, stages=joint.best.stages), k)
    assert isinstance(layout, RunLayout)
    merged = joint.best.merged
    return replace(layout, again=tuple(sorted(merged.runs)) if merged else ())
