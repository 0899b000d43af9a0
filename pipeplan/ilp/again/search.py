"""The search with recomputation: options and cuts together, then everything else as always.

Each candidate is a set of runs that suited some contiguous partition. Its merged chain, in which a
run is a layer, is searched like any other: eager cycles of several micro-batches, several stages
on a GPU, exact scheduling. The best candidate gets the time that is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from pipeplan.ilp import search
from pipeplan.ilp.again.merge import Merged, Run, merged
from pipeplan.ilp.again.options import Options, options
from pipeplan.ilp.again.partition import RunSolver
from pipeplan.ilp.bounds import load_bound
from pipeplan.ilp.costs import Costs
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.objective import cost

POINTS = 6
"""Periods between the bound and the best plan that suggest further runs."""
CANDIDATES_SHARE = 0.4
"""Share of the time for trying candidates; the best one gets the rest."""


@dataclass(frozen=True, slots=True)
class Found:
    """The best plan with recomputation: its merged chain and the state of the search on it."""

    merged: Merged
    state: Incumbent

    @property
    def cost(self) -> tuple[Fraction, Fraction]:
        """What the semantics minimize; infinite without a plan."""
        best = self.state.best
        if best is None:
            return Fraction(2**62), Fraction(0)
        return cost(self.state.costs, best, self.state.options.microbatches)


def run(state: Incumbent) -> Found | None:
    """The best plan found that may compute runs of layers again; None if there is none.

    Args:
        state: of a search without recomputation on the same chain, exact memory model, over or not
            begun; it gives options and clock, and is not changed.
    """
    chain, costs = state.costs.chain, state.costs
    if not costs.exact:
        return None
    state.enter("recomputation: options")
    offered = options(chain)
    lowest = max(1, int(load_bound(costs)))
    best: Found | None = None
    seen: set[tuple[Run, ...]] = set()
    begun, share = state.elapsed, CANDIDATES_SHARE * state.remaining
    for number, runs in enumerate(_candidates(costs, offered, lowest, state.most_in_flight)):
        if runs in seen:
            continue
        seen.add(runs)
        limit = begun + share * (number + 1) / (2 * POINTS + 2)
        found = _tried(state, merged(chain, runs), limit)
        if _better(found, best):
            best = found
        if found.state.phase == "interrupted" or state.remaining <= 0:
            return best
    if best is not None:
        best.state.options = state.options
        search.run(best.state)
    return best


def _candidates(
    costs: Costs, offered: Options, lowest: int, most: int | None
) -> Iterator[tuple[Run, ...]]:
    """Runs of the best 1F1B partition, without and with room for messages, and of relaxed ones."""
    exact = [
        RunSolver(costs, most, messages=messages, options=offered) for messages in (False, True)
    ]
    high = None
    for solver in exact:
        partition = solver.shortest(lowest)
        if partition is not None:
            high = partition.period
            yield solver.runs(partition)
    relaxed = RunSolver(costs, most, any_k=True, options=offered)
    first = relaxed.shortest(lowest)
    if first is None:
        return
    high = max(high or 2 * first.period, first.period)
    for point in range(POINTS):
        period = first.period + (high - first.period) * point // POINTS
        for solver in (relaxed, exact[0]):
            partition = solver.solve(period)
            if partition is not None:
                yield solver.runs(partition)


def _tried(state: Incumbent, chain: Merged, limit: float) -> Found:
    """The quick part of the search on one merged chain."""
    costs = replace(state.costs, chain=chain.chain)
    options_ = replace(state.options, contiguous_only=True, time_limit_s=limit)
    inner = Incumbent(costs, options_, state.report)
    search.run(inner)
    return Found(chain, inner)


def _better(one: Found, other: Found | None) -> bool:
    return one.state.best is not None and (other is None or one.cost < other.cost)
