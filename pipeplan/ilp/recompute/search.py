"""The search with recomputation: options and cuts together, then all other strategies.

Each initial set is a set of recomputed segments that suited some contiguous partition. Its
contracted chain, in which a segment is a layer, is searched like any other chain, with several
micro-batches per period too. Load balancing over cuts and segments together then improves the best
plan; what time it leaves goes to the search on that plan's chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from importlib.util import find_spec
from typing import Final

from pipeplan.ilp import portfolio, search
from pipeplan.ilp.bounds.infeasibility import reason_for_any_remat
from pipeplan.ilp.bounds.load import load_bound
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.portfolio import Arm, Portfolio
from pipeplan.ilp.recompute import one_gpu
from pipeplan.ilp.recompute.annealing import RecomputeAnnealing
from pipeplan.ilp.recompute.average_bytes import average_bytes_bound
from pipeplan.ilp.recompute.balancing import RecomputeBalancing
from pipeplan.ilp.recompute.bound import recompute_bound
from pipeplan.ilp.recompute.contracted_chain import contract
from pipeplan.ilp.recompute.initial_sets import POINTS, InitialSet, InitialSets
from pipeplan.ilp.recompute.joint_incumbent import JointIncumbent
from pipeplan.ilp.recompute.moves import ways
from pipeplan.ilp.recompute.options import StageOptions
from pipeplan.ilp.recompute.search_result import SearchResult
from pipeplan.ilp.recompute.step_search import RecomputeStepSearch
from pipeplan.ilp.recompute.trim import trim
from pipeplan.ilp.step.bound import step_bound
from pipeplan.ilp.warm_start import offer_warm_start
from pipeplan.plan import Plan

REQUIRED: Final = 2
"""Candidates that are tried even if listing options took all time; they share half of it."""
FEW_LAYERS: Final = 14
"""Layers up to which plans without recomputation are searched as a whole at first, for proofs."""
EVERY_LAYERS: Final = 7
"""Layers up to which every set of runs is tried: there are 2.6 times as many with each layer."""
MOST_LAYERS: Final = {False: 300, True: 200}
"""Longest chain whose options are listed: they grow with its square. With offloading they take
nine times the memory, and the time for them is better spent without."""


def run(state: Incumbent, starts: Sequence[Plan] = ()) -> SearchResult:
    """The best plan found, whether or not it recomputes anything.

    What the search without recomputation proves from bytes does not hold with it: claimed are the
    load bound, that of averages of time and bytes, that of the relaxed options for contiguous
    plans, and that no plan exists only where a single layer fits no GPU, or the states of all do
    not fit together.

    Args:
        state: Of a search without recomputation, not begun.
        starts: Valid plans of the same chain to start from.
    """
    limits, notes = state.options, state.notes
    state.note_missing_compiler()
    whole = Incumbent(state.costs, limits, notes=notes)
    joint = JointIncumbent(whole, SearchResult(state), state.report)
    state.report = joint.on_report
    whole.raise_bound("any", _bound(state), from_bytes=False)
    if not limits.whole_step:
        whole.raise_bound("any", average_bytes_bound(state.costs))
    whole.infeasible = reason_for_any_remat(state.costs)
    try:
        if whole.infeasible is None:
            if limits.whole_step:
                _search_steps(joint, state, starts)
            else:
                _search(joint, state, starts)
                if not joint.interrupted and state.uses("trim"):
                    trim(joint)
    except KeyboardInterrupt:
        if joint.period is None:
            raise
        joint.best.state.set_phase("interrupted")
    state.infeasible, state.options = whole.infeasible, limits
    best = joint.best.state
    best.options, best.bounds, best.contiguous = limits, whole.bounds, joint.contiguous
    best.notes = list(dict.fromkeys(notes))
    return joint.best


def _bound(state: Incumbent) -> Fraction:
    """What no plan goes below, whatever it recomputes, per micro-batch.

    A GPU's speed makes times longer by less than 1 ns each, which rounds a run once, (T2), and
    these bounds round each of its layers: forwards and backwards count as much less, and in a
    step those before a GPU's first op and behind its last one, too.
    """
    costs = state.costs
    rounded = 2 * costs.layers if any(gpu.speed != 1 for gpu in costs.cluster.gpus) else 0
    if state.options.whole_step:
        least = step_bound(costs, state.options.microbatches) - 2 * rounded
    else:
        least = load_bound(costs) - rounded
    return max(Fraction(0), least)


def _search(joint: JointIncumbent, state: Incumbent, starts: Sequence[Plan]) -> None:
    """The plans to start from, those that keep everything, candidates, bounds, then turns.

    Args:
        joint: the whole search.
        state: of plans without recomputation.
        starts: valid plans to start from.
    """
    whole = joint.state
    found = _started(joint, starts)
    _keep(joint, state)
    kept = state.bounds.get("k1", whole.bounds["any"])
    most = MOST_LAYERS[whole.options.offload]
    if whole.costs.layers > most:
        beside = " with --offload auto" if whole.options.offload else ""
        whole.notes.append(
            f"recomputation is only planned for chains of up to {most} layers{beside}"
        )
        joint.take(SearchResult(state))
        _further(joint)
        return
    if joint.interrupted or _reached(joint):
        return
    if whole.costs.gpus == 1:
        one_gpu.run(joint, found.listed())
    found = _first(joint, found)
    if joint.interrupted:
        return
    if whole.remaining >= found.bound_s or joint.period is None:
        _prove_contiguous(whole)
    if not whole.options.contiguous_only:
        _balance(joint, found.offered)
    _every(joint, kept)
    if whole.infeasible is None:
        _further(joint)


def _first(joint: JointIncumbent, found: InitialSets) -> InitialSets:
    """Sets to start from; while none has a plan, with runs in runs, then all layers alike."""
    _try_all(joint, found)
    if joint.period is None and not joint.interrupted:
        # Listing runs that hold runs takes long: they are for memory that nothing else fits.
        found = InitialSets(joint, nested=True)
        _try_all(joint, found)
    anywhere = not joint.state.options.contiguous_only
    if joint.period is None and anywhere and not joint.interrupted:
        _anywhere(joint)
    return found


def _try_all(joint: JointIncumbent, found: InitialSets) -> None:
    """The quick part of the search on each initial set; on one GPU, also of what may leave."""
    whole = joint.state
    share = portfolio.INITIAL_SETS * whole.remaining / 2
    required = REQUIRED + whole.options.offload
    for candidate in found:
        limit = share / required if candidate.required else share / (2 * POINTS)
        joint.take(_tried(joint, candidate, whole.elapsed + limit))
        if joint.interrupted:
            return


def _anywhere(joint: JointIncumbent) -> None:
    """Where no plan is known: any plan of a chain all of whose layers run alike."""
    whole = joint.state
    every = list(ways(whole.costs.chain))
    for number, runs in enumerate(every):
        if joint.period is not None or joint.interrupted:
            return
        contracted = contract(whole.costs.chain, runs)
        until = whole.elapsed + whole.remaining / (1 + len(every) - number)
        limits = replace(whole.options, time_limit_s=until)
        inner = Incumbent(contracted.of(whole.costs), limits, joint.on_report, notes=whole.notes)
        search.run(inner)
        joint.take(SearchResult(inner, contracted))


def _search_steps(joint: JointIncumbent, state: Incumbent, starts: Sequence[Plan]) -> None:
    """Step plans: those to start from, those that keep everything, then all of them.

    Args:
        joint: the whole search.
        state: of plans without recomputation.
        starts: valid plans to start from.
    """
    _started(joint, starts)
    _keep(joint, state)
    if not joint.interrupted and not _reached(joint):
        steps = RecomputeStepSearch(joint)
        joint.state.give(steps.name, steps.run, joint.state.remaining)
        if joint.period is None and not joint.interrupted:
            _first(joint, InitialSets(joint))


def _started(joint: JointIncumbent, starts: Sequence[Plan]) -> InitialSets:
    """Plans to start from are tried; sets that no one has tried yet are returned."""
    found = InitialSets(joint)
    for start in starts:
        for candidate in found.of(start):
            joint.take(_tried(joint, candidate, joint.state.elapsed))
    return found


def _balance(joint: JointIncumbent, offered: StageOptions | None) -> None:
    """Load balancing over cuts and segments and annealing in turns, until they find nothing more.

    Where layers are few, load balancing alone ends early, for the proof.
    """
    whole, annealing = joint.state, RecomputeAnnealing(joint, offered)
    balancing = RecomputeBalancing(joint, annealing)
    if _tries_every(whole):
        seconds = portfolio.BEFORE_EVERY_SET * whole.remaining
        whole.give(balancing.name, balancing.run, seconds)
        return
    arms = [Arm(each.name, each.run) for each in (balancing, annealing)]
    Portfolio(whole, arms, lambda: joint.done, lambda: joint.best.cost).run()


def _further(joint: JointIncumbent) -> None:
    """All of the search on the best plan's chain, for the time that is left."""
    solved, limits = joint.best, joint.state.options
    if joint.done:
        return
    inner = solved.state
    inner.options = replace(limits, time_limit_s=inner.elapsed + joint.state.remaining)
    search.ChainSearch(inner, contiguous_known=not inner.options.contiguous_only).run()
    inner.infeasible = None
    joint.take(solved)


def _keep(joint: JointIncumbent, state: Incumbent) -> None:
    """Contiguous plans without recomputation, and all others where layers are few."""
    limits = state.options
    seconds = portfolio.KEEP_ALL * state.remaining
    few = state.costs.layers <= FEW_LAYERS
    state.options = replace(
        limits,
        contiguous_only=limits.contiguous_only or not few,
        time_limit_s=state.elapsed + seconds,
    )
    search.run(state)
    state.options, state.infeasible = limits, None
    joint.take(SearchResult(state))


def _reached(joint: JointIncumbent) -> bool:
    """Whether the gap asked for is, whatever the time says."""
    bound, period = joint.state.bound, joint.period
    return period is not None and period <= bound * (1 + Fraction(joint.state.options.gap))


def _prove_contiguous(state: Incumbent) -> None:
    if not state.uses("recompute bound"):
        return
    state.set_phase("recompute bound")
    options = state.options
    bound = recompute_bound(
        state.costs, state.bounds["any"], offload=options.offload, limit=options
    )
    if bound is not None:
        state.raise_bound("contiguous", bound, from_bytes=False)
    elif state.options.contiguous_only:
        more = " or offloaded" if state.options.offload else ""
        state.infeasible = (
            f"chain {state.costs.chain.name!r}: no contiguous plan exists, whatever is"
            f" recomputed{more}: every way to cut it exceeds some GPU's memory or a link's time."
            " More memory or more GPUs would help; --method auto allows several stages on a GPU."
        )


def _every(joint: JointIncumbent, kept: Fraction) -> None:
    """Where layers are few, the best of all choices.

    Args:
        joint: the whole search.
        kept: a bound on plans of one micro-batch per period that recompute nothing.
    """
    state = joint.state
    if joint.interrupted or joint.done or not _tries_every(state):
        return
    from pipeplan.ilp.recompute import enumeration  # only here: contiguous plans need no CP-SAT

    rest = len(state.options.ks) > 1 and joint.period is not None
    share = portfolio.EVERY_SET if rest else 1.0
    enumeration.decide(joint, kept, share * state.remaining)


def _tries_every(state: Incumbent) -> bool:
    few = state.costs.layers <= EVERY_LAYERS and not state.options.contiguous_only
    return few and state.uses("recompute enumeration") and find_spec("ortools") is not None


def _tried(joint: JointIncumbent, candidate: InitialSet, limit: float) -> SearchResult:
    """The quick part of the search on one contracted chain."""
    costs = candidate.contracted.of(joint.state.costs)
    limits = replace(joint.state.options, time_limit_s=limit)
    inner = Incumbent(costs, limits, joint.on_report, notes=joint.state.notes)
    if candidate.plan is not None:  # a GPU may host several of its stages
        offer_warm_start(inner, candidate.plan)
        inner.bounds = {}
    inner.options = replace(limits, contiguous_only=True)
    if candidate.schedule is not None:
        inner.offer(candidate.schedule)
    search.run(inner)
    return SearchResult(inner, candidate.contracted)
