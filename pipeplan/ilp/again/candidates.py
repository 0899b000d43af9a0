"""Sets of runs to search with, the surest first.

Listing options takes time that grows with the square of the chain. Where it is short, segments of
the cuts that are best without a limit come first, and of all others each option there is time for;
the rest may keep everything or compute everything again, so that no plan of those kinds is missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from pipeplan.ilp.again.ample import ample_stages
from pipeplan.ilp.again.away import shortest_away
from pipeplan.ilp.again.merge import Merged, Run, merged, without_runs
from pipeplan.ilp.again.options import Options, options
from pipeplan.ilp.again.partition import RunSolver
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.schedule import Schedule
from pipeplan.plan import Plan

POINTS: Final = 6
"""Periods between the bound and the best plan that suggest further runs."""
LISTING_SHARE: Final = 0.3
"""Share of the time left that listing options may take."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A merged chain to search on, and what is known to start from."""

    merged: Merged
    plan: Plan | None = None
    schedule: Schedule | None = None


def candidates(state: Incumbent, start: Plan | None) -> Iterator[Candidate]:
    """Merged chains, each once: that of `start`, those of the best 1F1B partitions, and others.

    The best ones are found without room for messages, with it, and with offloading.
    """
    seen: set[frozenset[Run]] = {frozenset()}
    if start is not None:
        known, plan = without_runs(start)
        if known.runs:
            seen.add(known.runs)
            yield Candidate(known, plan)
    state.enter("recomputation: options")
    offered = _listed(state, offload=False)
    solvers = [
        RunSolver(state.costs, state.most_in_flight, messages=messages, options=offered)
        for messages in (False, True)
    ]
    high: int | None = None
    for solver in solvers:
        partition = solver.shortest(_lowest(state))
        if partition is not None:
            high = partition.period
            yield from _once(state, solver.runs(partition), seen)
    if state.options.offload and (state.options.deterministic or state.remaining > 0):
        state.enter("offloading: options")
        found = shortest_away(state, _listed(state, offload=True), high)
        if found is not None:
            yield Candidate(found[0], schedule=found[1])
    for runs in _relaxed(state, solvers[0], high):
        yield from _once(state, runs, seen)


def _listed(state: Incumbent, *, offload: bool) -> Options:
    """All options, or those there is time for; where work is counted, all."""
    if state.options.deterministic:
        return options(state.costs.chain, offload=offload)
    until = state.elapsed + LISTING_SHARE * state.remaining
    first = [stage.first for stage in ample_stages(state)]
    return options(
        state.costs.chain, offload=offload, first=first, go_on=lambda: state.elapsed < until
    )


def _once(
    state: Incumbent, runs: tuple[Run, ...], seen: set[frozenset[Run]]
) -> Iterator[Candidate]:
    """The chain of these runs unless it was seen."""
    if frozenset(runs) not in seen:
        seen.add(frozenset(runs))
        yield Candidate(merged(state.costs.chain, runs))


def _lowest(state: Incumbent) -> int:
    return max(1, int(state.bounds["any"]))


def _relaxed(state: Incumbent, roomy: RunSolver, high: int | None) -> Iterator[tuple[Run, ...]]:
    """Runs of relaxed partitions, and of 1F1B ones, at periods between bound and plan."""
    relaxed = RunSolver(state.costs, state.most_in_flight, any_k=True, options=roomy.options)
    first = relaxed.shortest(_lowest(state))
    if first is None:
        return
    high = max(high or 2 * first.period, first.period)
    for point in range(POINTS):
        period = first.period + (high - first.period) * point // POINTS
        for solver in (relaxed, roomy):
            partition = solver.solve(period)
            if partition is not None:
                yield solver.runs(partition)
