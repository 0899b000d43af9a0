"""The search with recomputation: options and cuts together, then everything else as always.

Each candidate is a set of runs that suited some contiguous partition. Its merged chain, in which a
run is a layer, is searched like any other: eager cycles of several micro-batches, several stages
on a GPU, exact scheduling. The best candidate gets the time that is left.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from fractions import Fraction
from importlib.util import find_spec
from typing import Final

from pipeplan.chain import Chain
from pipeplan.ilp import search
from pipeplan.ilp.again.bound import again_bound
from pipeplan.ilp.again.candidates import POINTS, Candidate, candidates
from pipeplan.ilp.again.merge import Merged
from pipeplan.ilp.bounds import load_bound
from pipeplan.ilp.feasibility import layer_reason
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.objective import cost
from pipeplan.ilp.resume import warm
from pipeplan.plan import Plan, Remat, Stage

SURE: Final = 2
"""Candidates that are tried even if listing options took all time; they share half of it."""
KEEPING_SHARE: Final = 0.35
"""Share of the time for plans that keep everything."""
CANDIDATES_SHARE: Final = 0.4
"""Share of what is left then for trying candidates; the best one gets the rest."""
EVERY_LAYERS: Final = 7
"""Layers up to which every set of runs is tried: there are 2.6 times as many with each layer."""
EVERY_SHARE: Final = 0.5
"""Share of the time left for that where other numbers of micro-batches per period remain."""
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
        away = {each.stage: each.runs for each in best.away}
        if self.merged:
            return tuple(self.merged.original(each, away.get(each.id, ())) for each in best.stages)
        return tuple(
            each.model_copy(update={"remat": Remat(offload=away[each.id])})
            if each.id in away
            else each
            for each in best.stages
        )

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
    kept, state.bounds = state.bounds.get("k1", bound), {}
    state.prove("any", bound, from_bytes=False)
    best = Solved(state)
    reached = state.gap is not None and state.gap <= limits.gap
    if state.phase != "interrupted" and not reached and state.infeasible is None:
        best = min(best, _again(state, start, kept), key=lambda solved: solved.cost)
    best.state.options, best.state.bounds, best.state.notes = limits, state.bounds, state.notes
    return best


def keeping(state: Incumbent) -> Solved:
    """The best plan found that computes nothing again but may send what it keeps to the host.

    Args:
        state: not begun, with offloading allowed: what is proven then are loads alone.
    """
    search.run(state)
    return Solved(state)


def _prove_contiguous(state: Incumbent) -> None:
    state.enter("recomputation: bound")
    lowest = max(1, int(state.bounds["any"]))
    bound = again_bound(state.costs, lowest, offload=state.options.offload)
    if bound is not None:
        state.prove("contiguous", bound, from_bytes=False)
    elif state.options.contiguous_only:
        more = " or offloaded" if state.options.offload else ""
        state.infeasible = (
            f"chain {state.costs.chain.name!r}: no contiguous plan exists, whatever is computed"
            f" again{more}: every way to cut it exceeds some GPU's memory or a link's time."
            " More memory or more GPUs would help; --method auto allows several stages on a GPU."
        )


def _again(state: Incumbent, start: Plan | None, kept: Fraction) -> Solved:
    """The best plan found on merged chains; one without a plan if there is none.

    Ctrl-C ends it early, whatever it does, unless nothing is found yet.

    Args:
        state: whose bounds hold with recomputation.
        start: a valid plan to start from.
        kept: a bound on plans of one micro-batch per period that compute nothing again.
    """
    best = Solved(state)
    if state.costs.layers > MOST_LAYERS:
        state.notes.append(
            f"recomputation is only planned for chains of up to {MOST_LAYERS} layers"
        )
        return best
    share = CANDIDATES_SHARE * state.remaining / 2
    sure = SURE + state.options.offload
    try:
        for number, candidate in enumerate(candidates(state, start), start=1):
            limit = share / sure if number <= sure else share / (2 * POINTS)
            tried = _tried(state, candidate, state.elapsed + limit)
            if tried.cost < best.cost:
                best = tried
            interrupted = tried.state.phase == "interrupted"
            if interrupted or (state.remaining <= 0 and number >= sure + (start is not None)):
                return best
        _prove_contiguous(state)
        best = _every(state, best, kept)
        if best.merged is not None:
            best.state.options = state.options
            search.run(best.state)
    except KeyboardInterrupt:
        if best.state.best is None:
            raise
        best.state.enter("interrupted")
    return best


def _every(state: Incumbent, best: Solved, kept: Fraction) -> Solved:
    """The best of all choices where layers are few, else what is known."""
    few = state.costs.layers <= EVERY_LAYERS and not state.options.contiguous_only
    if not few or find_spec("ortools") is None:
        return best
    from pipeplan.ilp.again import every  # only here: contiguous plans need no CP-SAT

    share = 1.0 if len(state.options.ks) == 1 else EVERY_SHARE
    found = every.decide(state, best.state.best, kept, share * state.remaining)
    return best if found is None else min(best, Solved(*found), key=lambda solved: solved.cost)


def _tried(state: Incumbent, candidate: Candidate, limit: float) -> Solved:
    """The quick part of the search on one merged chain."""
    costs = candidate.merged.of(state.costs)
    quick = replace(state.options, contiguous_only=True, time_limit_s=limit)
    inner = Incumbent(costs, quick, state.report)
    if candidate.plan is not None:
        warm(inner, candidate.plan)
        inner.bounds = {}
    if candidate.schedule is not None:
        inner.offer(candidate.schedule)
    search.run(inner)
    return Solved(inner, candidate.merged)
