"""The part of the search that needs CP-SAT: any feasible plan, then several stages per GPU."""

from __future__ import annotations

from functools import partial

from pipeplan.ilp import noncontiguous
from pipeplan.ilp.bounds import packing
from pipeplan.ilp.bounds.assignment import find_feasible_assignment, serial_schedule
from pipeplan.ilp.bounds.counting import raise_bound
from pipeplan.ilp.bounds.infeasibility import assignment_reason
from pipeplan.ilp.cpsat.extract import fuse
from pipeplan.ilp.cycle_ratio import minimize_period_for_order
from pipeplan.ilp.exact import stage_counts
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.local_search.annealing import SimulatedAnnealing
from pipeplan.ilp.local_search.balancing import BalanceAndSchedule
from pipeplan.ilp.local_search.interleaved_starts import InterleavedStarts
from pipeplan.ilp.local_search.restarts import EqualSplitRestarts

INTERLEAVED_SHARE = 0.25
"""Share of the time left that interleaved starts have where memory is scarce."""
FAR_SHARE = 0.25
"""Share of the time left that annealing has then."""
EARLY_SHARE = 0.08
"""The same elsewhere; it comes before the bound, which is sought below the best plan."""
PACKING_SHARE = 0.1
"""Share of the time left that the bound from packing equal layers may take."""
BRIEF_SHARE = 0.01
"""Share of the time left that load balancing and annealing have at first: what is easy is
found."""
BALANCING_SHARE = 0.25
"""Share of the time left that load balancing has before that."""
RESTARTS_SHARE = 0.35
"""Share of the time left that it has then from equal shares, where layers are too many for the
assignment model and stage counts to find more; the early share elsewhere."""
BOUND_SHARE = 0.25
"""Share of the time left that the bound on counts may take."""


def search(state: Incumbent) -> None:
    """Find a plan where no contiguous one was found, or prove that none exists; improve it."""
    if state.best is None:
        _any_plan(state)
    if state.infeasible is None and not state.done:
        state.give(
            "packing bound", partial(packing.raise_bound, state), PACKING_SHARE * state.remaining
        )
    many = state.costs.layers > noncontiguous.JOINT_ITEMS
    if state.infeasible is None and many:
        _shorten(state)
    if state.infeasible is None and not state.done and not state.options.offload:
        state.give("counting bound", partial(raise_bound, state), BOUND_SHARE * state.remaining)
    if state.infeasible is None and not state.done:
        noncontiguous.search(state)


def _shorten(state: Incumbent) -> None:
    """Load balancing, then annealing; interleaved starts where the plan is far from the bound."""
    annealing = SimulatedAnnealing(state)
    interleaved = InterleavedStarts(state, annealing)
    balancing = BalanceAndSchedule(state)
    for name, run in (("balancing", balancing.run), ("annealing", annealing.run)):
        if not state.done:
            state.give(name, run, BRIEF_SHARE * state.remaining)
    if not state.done:
        state.give("balancing", balancing.run, BALANCING_SHARE * state.remaining)
        many = state.costs.layers > stage_counts.MOST_LAYERS
        share = RESTARTS_SHARE if many else EARLY_SHARE
        state.give("restarts", EqualSplitRestarts(state, annealing).run, share * state.remaining)
    state.give("interleaved starts", interleaved.run, INTERLEAVED_SHARE * state.remaining)
    if not state.done:
        share = FAR_SHARE if interleaved.far else EARLY_SHARE
        state.give("annealing", annealing.run, share * state.remaining)


def _any_plan(state: Incumbent) -> None:
    """Spread the layers over the GPUs, one micro-batch at a time, or prove that it cannot be."""
    state.set_phase("assignment")
    found = find_feasible_assignment(state.costs, state.options, state.remaining)
    if found.missing and not state.options.offload:
        state.infeasible = assignment_reason(state.costs, found.missing)
    if found.home is not None:
        schedule = minimize_period_for_order(
            state.costs, serial_schedule(state.costs, found.home), 1
        )
        state.offer(fuse(state.costs, schedule) or schedule)
        state.offer(schedule)
