"""Improving the best plan in time slices that adapt, until the time is over.

The strategies get slices that grow: those over allocations and recomputed segments together, the
search on the best plan's contracted chain, and the one without recomputation as long as the bounds
of its chain leave room below the best plan. A strategy that finds nothing has half its slice the
next time; one that improves the plan gets its full slice back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Final

from pipeplan.ilp import search
from pipeplan.ilp.contiguous.kfkb_search import KFkBSearch
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.recompute.annealing import RecomputeAnnealing
from pipeplan.ilp.recompute.balancing import RecomputeBalancing
from pipeplan.ilp.recompute.joint_incumbent import JointIncumbent
from pipeplan.ilp.recompute.options import StageOptions
from pipeplan.ilp.recompute.search_result import SearchResult

TURN_SHARE: Final = 0.2
"""Share of the time left that a part's first turn takes."""
TURN_S: Final = 8.0
"""Seconds of a first turn at most."""
LONGER: Final = 1.5
"""Factor from one turn to the next."""
BALANCING: Final = 2.0
"""Turns that load balancing may have at once: it finds most."""
LEAST: Final = 0.25
"""Share of its turn that a part still has that never finds anything."""
NEAR: Final = Fraction(11, 10)
"""How much longer the best plan that keeps everything may be to come first."""
IDLE: Final = 0.25
"""Where all parts together use less than so much of their time in vain, nothing is left to try."""


@dataclass
class _Arm:
    """A strategy; `run` takes seconds, `share` is how much of a turn it has."""

    name: str
    run: Callable[[float], None]
    most: float = 1.0
    share: float = field(init=False)

    def __post_init__(self) -> None:
        """At first as much as it may have."""
        self.share = self.most


class TimeSlices:
    """What takes turns on one search."""

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
        self._cycles: KFkBSearch | None = None
        """On the best plan's chain, as far as it is."""

    def run(self) -> None:
        """Go on from the best plan while there is time."""
        joint, state = self.joint, self.joint.state
        turn = min(TURN_S, TURN_SHARE * state.remaining)
        parts = self._parts()
        while not joint.done:
            begun, before, given = state.elapsed, joint.best.cost, 0.0
            for part in parts:
                if not joint.done:
                    given += self._take(part, turn)
            if joint.best.cost == before and state.elapsed - begun < IDLE * given:
                return
            turn *= LONGER

    def _take(self, part: _Arm, turn: float) -> float:
        """One turn of one part; how many seconds it may have taken."""
        before = self.joint.best.cost
        seconds = min(turn * part.share, self.joint.state.remaining)
        part.run(seconds)
        found = self.joint.best.cost < before
        part.share = part.most if found else max(LEAST, part.share / 2)
        return seconds

    def _parts(self) -> list[_Arm]:
        """Plans without recomputation come first where they are nearly as short as the best."""
        joint, best = self.joint, self.kept.best
        parts = [_Arm("best chain", self._around), _Arm("plain chain", self._plain)]
        if self._offered is not None and not joint.state.options.contiguous_only:
            annealing = RecomputeAnnealing(joint, self._offered)
            runs = RecomputeBalancing(joint, annealing)
            parts = [
                _Arm("recompute balancing", runs.run, BALANCING),
                _Arm("recompute kfkb", self._cycle),
                *parts,
                _Arm("recompute annealing", annealing.run),
            ]
        if best is not None and joint.period is not None:
            near = best.per_microbatch <= NEAR * joint.period
            parts.sort(key=lambda part: near and part.run == self._plain, reverse=True)
        return [part for part in parts if joint.state.uses(part.name)]

    def _cycle(self, seconds: float) -> None:
        """Several micro-batches per period, on partitions of the best plan's chain."""
        inner = self.joint.best.state
        if inner.contiguous is None or inner.options.ks == (1,):
            return
        self._limit(inner, seconds)
        if self._cycles is None or self._cycles.state is not inner:
            self._cycles = KFkBSearch(inner)
        self._cycles.run(seconds)

    def _around(self, seconds: float) -> None:
        """The best plan's chain, whatever it is."""
        self._further(self.joint.best, seconds)

    def _plain(self, seconds: float) -> None:
        """All that is kept, unless that is the best plan's chain."""
        if self.joint.best.state is not self.kept:
            self._further(SearchResult(self.kept), seconds)

    def _further(self, solved: SearchResult, seconds: float) -> None:
        """The search on one chain goes on, with other random numbers, unless it cannot gain."""
        inner = solved.state
        if not self.joint.may_gain(inner):
            return
        self._limit(inner, seconds)
        (search.run if inner.options.contiguous_only else search.beyond)(inner)
        inner.infeasible = None
        self.joint.take(solved)

    def _limit(self, inner: Incumbent, seconds: float) -> None:
        self._seed = (self._seed + 1) % 2**31
        limits = self.joint.state.options
        inner.options = replace(limits, time_limit_s=inner.elapsed + seconds, seed=self._seed)
