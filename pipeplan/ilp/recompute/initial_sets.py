"""Sets of recomputed segments to start from, those that must be tried first.

Listing options takes time that grows with the square of the chain. Where that time is short, the
stages of the cuts that are best without a memory limit are listed first, then all other segments
as long as there is time. The rest may recompute nothing or everything, so that no plan of those
kinds is missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from typing import Final

from pipeplan.ilp import portfolio
from pipeplan.ilp.clock import OutOfTimeError
from pipeplan.ilp.contiguous import small_stages
from pipeplan.ilp.contiguous.dynamic_program import ContiguousPartition
from pipeplan.ilp.contiguous.unconstrained import unconstrained_stages
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.recompute.contracted_chain import ContractedChain, contract, contracted_plan
from pipeplan.ilp.recompute.dynamic_program import RecomputeDP
from pipeplan.ilp.recompute.joint_incumbent import JointIncumbent
from pipeplan.ilp.recompute.offload_program import shortest_with_offload
from pipeplan.ilp.recompute.options import StageOptions, list_options
from pipeplan.ilp.runs import Run
from pipeplan.ilp.schedule import Schedule
from pipeplan.plan import Plan

BOUND_COST: Final = 5
"""How many times as long it takes to list relaxed options, in which runs may hold runs."""
POINTS: Final = 6
"""Periods between the bound and the best plan that suggest further runs."""


@dataclass(frozen=True, slots=True)
class InitialSet:
    """A contracted chain to search on, what is known to start from, whether it must be tried."""

    contracted: ContractedChain
    plan: Plan | None = None
    schedule: Schedule | None = None
    required: bool = False


class InitialSets:
    """Contracted chains, each once: that of a plan, those of the best 1F1B partitions, and others.

    Attributes:
        joint: the search they are for.
        offered: what stages may choose, once that is listed.
        bound_s: seconds that a bound is expected to take, by what listing and cutting took.
    """

    def __init__(self, joint: JointIncumbent, *, nested: bool = False) -> None:
        """Begin with nothing; `nested`: of runs that may hold runs."""
        self.joint, self.nested = joint, nested
        self.offered: StageOptions | None = None
        self.bound_s = 0.0
        self._seen: set[frozenset[Run]] = {frozenset()}

    def of(self, start: Plan) -> Iterator[InitialSet]:
        """The contracted chain of a valid plan with that plan, if it recomputes anything."""
        known, plan = contracted_plan(start)
        if known.runs:
            self._seen.add(known.runs)
            yield InitialSet(known, plan)

    def listed(self) -> StageOptions:
        """What stages may choose; all that there is time for, at the first call."""
        if self.offered is None:
            self.offered = _listed(self.joint.state, self.nested)
        return self.offered

    def __iter__(self) -> Iterator[InitialSet]:
        """Required: the best with and without room for messages; others while there is time."""
        state = self.joint.state
        begun = state.elapsed
        state.set_phase("recompute options")
        offered = self.listed()
        solvers = [
            RecomputeDP(state.costs, state.most_in_flight, messages=messages, options=offered)
            for messages in (False, True)
        ]
        high: int | None = None
        for solver in solvers:
            # with room for messages no period is shorter than without
            partition = _shortest(state, solver, high or _lowest(state))
            took = (state.elapsed - begun) * (1 if self.nested else BOUND_COST)
            self.bound_s = self.bound_s or took
            if partition is None:
                break
            high = partition.period
            yield from self._once(solver.runs(partition), required=True)
        if state.options.offload and (state.remaining > 0 or self.joint.period is None):
            yield from self._away(state, high)
        for runs in _relaxed(state, solvers[0], high):
            if state.remaining <= 0:
                return
            yield from self._once(runs)

    def _once(self, runs: tuple[Run, ...], *, required: bool = False) -> Iterator[InitialSet]:
        """The chain of these runs unless it was seen."""
        if frozenset(runs) not in self._seen:
            self._seen.add(frozenset(runs))
            yield InitialSet(contract(self.joint.state.costs.chain, runs), required=required)

    def _away(self, state: Incumbent, high: int | None) -> Iterator[InitialSet]:
        """The best 1F1B partition that offloads; it was judged as a whole."""
        assert self.offered is not None
        for small in (False, True):
            if small and not small_stages.applies(state):
                return
            state.set_phase(small_stages.NAME if small else "offload options")
            found = shortest_with_offload(
                self.joint, self.offered, high, needed=self.joint.period is None, small=small
            )
            if found is not None:
                high = ceil(found[1].per_microbatch)
                yield InitialSet(found[0], schedule=found[1], required=True)


def _listed(state: Incumbent, nested: bool) -> StageOptions:
    """All options, or those there is time for; where work is counted, all."""
    listed = partial(list_options, state.costs.chain, offload=state.options.offload, nested=nested)
    if state.options.deterministic:
        return listed()
    until = state.elapsed + portfolio.LISTING * state.remaining
    first = [stage.first for stage in unconstrained_stages(state, quick=True)]
    return listed(first=first, go_on=lambda: state.elapsed < until)


def _lowest(state: Incumbent) -> int:
    return max(1, int(state.bounds["any"]))


def _shortest(state: Incumbent, solver: RecomputeDP, lowest: int) -> ContiguousPartition | None:
    """The partition of the shortest period; of one order of GPUs where all take too long."""
    try:
        return solver.shortest(lowest, solver.limit(state.options, portfolio.CONTIGUOUS))
    except OutOfTimeError:
        return replace(solver, in_order=True).shortest(lowest)


def _relaxed(state: Incumbent, roomy: RecomputeDP, high: int | None) -> Iterator[tuple[Run, ...]]:
    """Runs of relaxed partitions, and of 1F1B ones, at periods between bound and plan."""
    if state.remaining <= 0:
        return
    relaxed = RecomputeDP(state.costs, state.most_in_flight, any_k=True, options=roomy.options)
    first = _shortest(state, relaxed, _lowest(state))
    if first is None:
        return
    high = max(high or 2 * first.period, first.period)
    over = relaxed.limit(state.options)
    for point in range(POINTS):
        period = first.period + (high - first.period) * point // POINTS
        for solver in (relaxed, roomy):
            try:
                partition = solver.solve(period, over=over)
            except OutOfTimeError:
                return
            if partition is not None:
                yield solver.runs(partition)
