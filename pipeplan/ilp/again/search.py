"""The search with recomputation: options and cuts together, then everything else as always.

Each candidate is a set of runs that suited some contiguous partition. Its merged chain, in which a
run is a layer, is searched like any other: eager cycles of several micro-batches, several stages
on a GPU, exact scheduling. The best candidate gets the time that is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

from pipeplan.chain import Chain
from pipeplan.ilp import search
from pipeplan.ilp.again.bound import again_bound
from pipeplan.ilp.again.merge import Merged, Run, merged, without_runs
from pipeplan.ilp.again.options import Options, options
from pipeplan.ilp.again.partition import RunSolver
from pipeplan.ilp.bounds import load_bound
from pipeplan.ilp.feasibility import layer_reason
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.objective import cost
from pipeplan.ilp.resume import warm
from pipeplan.plan import Plan, Stage

POINTS: Final = 6
"""Periods between the bound and the best plan that suggest further runs."""
SURE: Final = 2
"""Candidates that are tried even if listing options took all time; they share half of it."""
KEEPING_SHARE: Final = 0.35
"""Share of the time for plans that keep everything."""
CANDIDATES_SHARE: Final = 0.4
"""Share of what is left then for trying candidates; the best one gets the rest."""
MOST_LAYERS: Final = 200
"""Longest chain whose options are listed: they grow with its square."""


@dataclass(frozen=True, slots=True)
class Solved:
    """A search that is over; with recomputation it was one on a merged chain."""

    state: Incumbent
    merged: Merged | None = None

    @property
    def chain(self) -> Chain:
        """What the user asked about."""
        return self.merged.source if self.merged else self.state.costs.chain

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The best plan's stages in layers of `chain`."""
        best = self.state.best
        assert best is not None
        return tuple(map(self.merged.original, best.stages)) if self.merged else best.stages

    @property
    def cost(self) -> tuple[Fraction, Fraction]:
        """What the semantics minimize; infinite without a plan."""
        best, options_ = self.state.best, self.state.options
        if best is None:
            return Fraction(2**62), Fraction(0)
        return cost(self.state.costs, best, options_.microbatches)


def run(state: Incumbent, start: Plan | None = None) -> Solved:
    """The best plan found, whether or not it computes anything again.

    What the search without recomputation proves from bytes does not hold with it: claimed are the
    load bound, that of the relaxed options for contiguous plans, and that no plan exists only
    where a single layer fits no GPU.

    Args:
        state: Of a search without recomputation, not begun.
        start: A valid plan of the same chain to start from.
    """
    limits, bound = state.options, load_bound(state.costs)
    state.options = replace(limits, time_limit_s=state.elapsed + KEEPING_SHARE * state.remaining)
    search.run(state)
    state.options, state.infeasible = limits, layer_reason(state.costs)
    state.bounds = {}
    state.prove("any", bound)
    best = Solved(state)
    if state.phase != "interrupted" and not state.done and state.infeasible is None:
        best = min(best, _again(state, start), key=lambda solved: solved.cost)
    best.state.options, best.state.bounds, best.state.notes = limits, state.bounds, state.notes
    return best


def _prove_contiguous(state: Incumbent) -> None:
    state.enter("recomputation: bound")
    bound = again_bound(state.costs, max(1, int(state.bounds["any"])))
    if bound is not None:
        state.prove("contiguous", bound)
    elif state.options.contiguous_only:
        state.infeasible = (
            f"chain {state.costs.chain.name!r}: no contiguous plan exists, whatever is computed"
            " again: every way to cut it exceeds some GPU's memory or a link's time."
            " More memory or more GPUs would help; --method auto allows several stages on a GPU."
        )


def _again(state: Incumbent, start: Plan | None) -> Solved:
    """The best plan found on merged chains; one without a plan if there is none."""
    best = Solved(state)
    if state.costs.layers > MOST_LAYERS:
        state.notes.append(
            f"recomputation is only planned for chains of up to {MOST_LAYERS} layers"
        )
        return best
    share = CANDIDATES_SHARE * state.remaining / 2
    for number, (chain, plan) in enumerate(_candidates(state, start), start=1):
        limit = share / SURE if number <= SURE else share / (2 * POINTS)
        tried = _tried(state, chain, plan, state.elapsed + limit)
        if tried.cost < best.cost:
            best = tried
        interrupted = tried.state.phase == "interrupted"
        if interrupted or (state.remaining <= 0 and number >= SURE):
            return best
    _prove_contiguous(state)
    if best.merged is not None:
        best.state.options = state.options
        search.run(best.state)
    return best


def _candidates(state: Incumbent, start: Plan | None) -> Iterator[tuple[Merged, Plan | None]]:
    """Merged chains to search on, each once; that of `start` with its plan."""
    seen: set[frozenset[Run]] = {frozenset()}
    if start is not None:
        known, plan = without_runs(start)
        if known.runs:
            seen.add(known.runs)
            yield known, plan
    state.enter("recomputation: options")
    offered = options(state.costs.chain)
    for runs in _suggested(state, offered):
        if frozenset(runs) not in seen:
            seen.add(frozenset(runs))
            yield merged(state.costs.chain, runs), None


def _suggested(state: Incumbent, offered: Options) -> Iterator[tuple[Run, ...]]:
    """Runs of the best 1F1B partition, without and with room for messages, and of relaxed ones."""
    costs, most, lowest = state.costs, state.most_in_flight, max(1, int(state.bounds["any"]))
    roomy, narrow = (
        RunSolver(costs, most, messages=messages, options=offered) for messages in (False, True)
    )
    high = None
    for solver in (roomy, narrow):
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
        for solver in (relaxed, roomy):
            partition = solver.solve(period)
            if partition is not None:
                yield solver.runs(partition)


def _tried(state: Incumbent, chain: Merged, plan: Plan | None, limit: float) -> Solved:
    """The quick part of the search on one merged chain."""
    costs = replace(state.costs, chain=chain.chain)
    quick = replace(state.options, contiguous_only=True, time_limit_s=limit)
    inner = Incumbent(costs, quick, state.report)
    if plan is not None:
        warm(inner, plan)
        inner.bounds = {}
    search.run(inner)
    return Solved(inner, chain)
