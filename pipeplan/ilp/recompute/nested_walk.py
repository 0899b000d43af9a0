"""Annealing over allocations whose runs hold other runs, step by step.

It takes the place of `AllocationWalk`, whose arrays have no runs in runs. Such plans are for
memory that nothing else fits, where runs on one level are far from any plan. A step moves a cut or
a stage, or changes the runs of a stage, and each is judged by its plan. Source: ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp
from random import Random

import numpy as np

from pipeplan.ilp.compiled import Floats
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.local_search.allocation import Allocation
from pipeplan.ilp.local_search.allocation_moves import CHANGING_RUNS
from pipeplan.ilp.local_search.allocation_walk import stepped
from pipeplan.ilp.recompute.contraction_cache import clip_to_stages
from pipeplan.ilp.recompute.moves import mutate, options_of
from pipeplan.ilp.recompute.options import StageOptions
from pipeplan.ilp.runs import Runs, Segment


class NestedWalk:
    """One walk from allocation to allocation.

    Attributes:
        new: What the last step came to.
        waits: Whether that waits until it is `judged`.
        closest: The least excess since the beginning, and the allocation that has it.
    """

    def __init__(
        self,
        costs: CostModel,
        offered: StageOptions | None,
        random: Random,
        draws: np.random.Generator,
    ) -> None:
        """Nowhere yet: `begin` says where.

        Args:
            costs: of the chain as it is.
            offered: sets of runs of each segment; None: nobody has listed them.
            random: what changes of runs draw from.
            draws: what other steps draw from.
        """
        self._costs, self._offered, self._random, self._draws = costs, offered, random, draws
        self._sets: dict[Segment, Sequence[Runs]] = {}

    def begin(self, layout: Allocation, excess: float, period: int) -> None:
        """Go on from an allocation that is so far from a plan, as a share of a GPU's memory."""
        self._at, self._excess, self.closest = layout, excess, (excess, layout)
        self.new, self._found, self.waits = layout, excess, False

    def run(self, heats: Floats) -> tuple[int, int]:
        """Accept the last step or not, if there is one, and make another.

        Args:
            heats: excess that the step accepts with probability 1/e.

        Returns:
            How many steps are done; no copies of stages are placed here.
        """
        done = int(self.waits)
        if self.waits:
            behind = self._found - self._excess
            if behind <= 0 or self._random.random() < exp(-behind / heats[0]):
                self._at, self._excess = self.new, self._found
                self.closest = min(self.closest, (self._excess, self._at), key=lambda one: one[0])
        self.new, self.waits = self._step(self._at), True
        return done, 0

    def judged(self, excess: float) -> None:
        """The allocation `new` is so far from a plan."""
        self._found = excess

    def _step(self, layout: Allocation) -> Allocation:
        """Other runs in a stage, or an allocation changed."""
        if self._random.random() > CHANGING_RUNS:
            return stepped(self._costs, layout, self._draws)
        stages = layout.segments()
        stage = self._random.choice(stages)
        runs = clip_to_stages(layout.recompute, stages)
        options = options_of(self._costs.chain, stage)
        new = mutate(self._random, runs, stage, self._sets_of(stage), options)
        return replace(layout, recompute=new)

    def _sets_of(self, stage: Segment) -> Sequence[Runs]:
        """The sets of runs that the options of a segment stand for."""
        if self._offered is None:
            return ()
        if stage not in self._sets:
            numbers = range(self._offered.counts[stage])
            self._sets[stage] = [self._offered.runs(*stage, number) for number in numbers]
        return self._sets[stage]
