"""Improving the best plan with recomputation in rounds of slices, until the time is over.

Slices go to the strategies over allocations and recomputed segments together, to the search on the
best plan's contracted chain, and to the one without recomputation as long as the bounds of its
chain leave room below the best plan.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Final

from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.portfolio import RECOMPUTE_BALANCING, Arm, Portfolio
from pipeplan.ilp.recompute.annealing import RecomputeAnnealing
from pipeplan.ilp.recompute.balancing import RecomputeBalancing
from pipeplan.ilp.recompute.joint_incumbent import JointIncumbent
from pipeplan.ilp.recompute.options import StageOptions
from pipeplan.ilp.recompute.search_result import SearchResult
from pipeplan.ilp.search import ChainSearch

NEAR: Final = Fraction(11, 10)
"""How much longer the best plan that keeps everything may be to come first."""


class Rounds:
    """What has slices of one search."""

    def __init__(
        self, joint: JointIncumbent, kept: Incumbent, offered: StageOptions | None
    ) -> None:
        """Begin from the best plan.

        Args:
            joint: the whole search.
            kept: the search for plans without recomputation.
            offered: what stages may choose; None where the chain is too long for that.
        """
        self.joint, self.kept = joint, kept
        self._offered = offered
        self._seed = joint.state.options.seed
        self._searches: list[ChainSearch] = []
        """Those on the best plan's chain and on the one without recomputation, as far as begun."""

    def run(self) -> None:
        """Go on from the best plan while there is time."""
        joint = self.joint
        Portfolio(joint.state, self._arms(), lambda: joint.done, lambda: joint.best.cost).run()

    def _arms(self) -> list[Arm]:
        """Plans without recomputation come first where they are nearly as short as the best."""
        joint, best = self.joint, self.kept.best
        arms = [Arm("best chain", self._around), Arm("plain chain", self._plain)]
        if self._offered is not None and not joint.state.options.contiguous_only:
            annealing = RecomputeAnnealing(joint, self._offered)
            runs = RecomputeBalancing(joint, annealing)
            arms = [
                Arm(runs.name, runs.run, RECOMPUTE_BALANCING),
                Arm("recompute kfkb", self._cycle),
                *arms,
                Arm(annealing.name, annealing.run),
            ]
        if best is not None and joint.period is not None:
            near = best.per_microbatch <= NEAR * joint.period
            arms.sort(key=lambda arm: near and arm.run == self._plain, reverse=True)
        return arms

    def _cycle(self, seconds: float) -> None:
        """Several micro-batches per period, on partitions of the best plan's chain."""
        inner = self.joint.best.state
        if inner.contiguous is None or inner.options.ks == (1,):
            return
        self._limit(inner, seconds)
        self._search_of(inner).cycles.run(seconds)

    def _around(self, seconds: float) -> None:
        """The best plan's chain, whatever it is."""
        self._further(self.joint.best, seconds)

    def _plain(self, seconds: float) -> None:
        """All that is kept, unless that is the best plan's chain."""
        if self.joint.best.state is not self.kept:
            self._further(SearchResult(self.kept), seconds)

    def _further(self, solved: SearchResult, seconds: float) -> None:
        """The search on one chain goes on where it was left, unless it cannot gain."""
        inner = solved.state
        if not self.joint.may_gain(inner):
            return
        self._limit(inner, seconds)
        self._search_of(inner).run()
        inner.infeasible = None
        self.joint.take(solved)

    def _search_of(self, inner: Incumbent) -> ChainSearch:
        """What improves `inner`, begun or new; what improves no longer the best plan is let go."""
        used = {id(inner), id(self.kept), id(self.joint.best.state)}
        self._searches = [each for each in self._searches if id(each.state) in used]
        for each in self._searches:
            if each.state is inner:
                return each
        new = ChainSearch(inner, contiguous_known=not inner.options.contiguous_only)
        self._searches.append(new)
        return new

    def _limit(self, inner: Incumbent, seconds: float) -> None:
        self._seed = (self._seed + 1) % 2**31
        limits = self.joint.state.options
        inner.options = replace(limits, time_limit_s=inner.elapsed + seconds, seed=self._seed)
