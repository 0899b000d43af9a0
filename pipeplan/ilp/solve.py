"""The one door of the solver: a problem and limits in, the best schedule and proofs out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from importlib.util import find_spec
from typing import Final

from pipeplan.errors import InfeasibleError, InputError, TimeLimitError
from pipeplan.ilp import multilevel, portfolio, search
from pipeplan.ilp.bounds import infeasibility
from pipeplan.ilp.compiled import COMPILING, compiling_told
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.history import History
from pipeplan.ilp.incumbent import Incumbent, Report, SearchOptions
from pipeplan.ilp.problem import MOST_COPIES, Limits, Problem, options_of
from pipeplan.ilp.recompute import baselines
from pipeplan.ilp.recompute import search as recompute_search
from pipeplan.ilp.recompute.search_result import SearchResult
from pipeplan.ilp.solution import Solution, solution
from pipeplan.ilp.warm_start import offer_warm_start
from pipeplan.plan import Plan
from pipeplan.sums import check_sums

PERIODIC: Final = (
    "--offload auto: under flush a periodic schedule is cut off after the step; plan without it,"
    " too: whole steps, which do not offload, may be shorter where they fit"
)
LONG_STEP: Final = (
    f"a step of more than {MOST_COPIES} micro-batches is a periodic schedule, cut off at its end:"
    " a plan file lists no more; of fewer (--microbatches) whole steps are planned, which may be"
    " faster"
)
TIME_OVER: Final = 0.95
"""Share of the limit from which on the limit ended the search: its last part stops early."""


@dataclass
class _Listener:
    """Keeps the history and passes reports on."""

    history: History
    progress: Report | None
    known: tuple[Fraction | None, Fraction, float | None] = (None, Fraction(0), None)
    """Period, bound and gap that were heard last."""
    strategy: str = "start"
    compiled: set[str] = field(default_factory=set)
    """Strategies of which it was told that they are compiled."""

    def __call__(
        self,
        seconds: float,
        period: Fraction | None,
        bound: Fraction,
        gap: float | None,
        phase: str,
    ) -> None:
        self.known, self.strategy = (period, bound, gap), phase.partition(":")[0]
        self.history.record(period, bound, phase)
        if self.progress:
            self.progress(seconds, period, bound, gap, phase)

    def compiling(self) -> None:
        """What runs now is compiled first, which may take half a minute: told once for each."""
        if self.progress and self.strategy not in self.compiled:
            self.compiled.add(self.strategy)
            phase = f"{self.strategy}: {COMPILING}"
            self.progress(self.history.clock.wall_s, *self.known, phase)


def solve(
    problem: Problem,
    limits: Limits | None = None,
    warm_starts: Sequence[Plan] = (),
    progress: Report | None = None,
) -> Solution:
    """The best schedule found within the limits, with proven bounds beside it.

    Args:
        problem: What is planned, and which plans count.
        limits: When the search ends.
        warm_starts: Valid plans of the same chain to start from; their proofs are kept where all
            else is equal.
        progress: Called whenever the plan, the bound or the phase changes.

    Returns:
        The solver's claim: whether it keeps every rule of docs/reference/model.md is for others to
        judge. Ctrl-C during the search returns the best so far.

    Raises:
        InfeasibleError: if it is proven that no plan exists.
        TimeLimitError: if neither a plan nor a proof was found.
        InputError: if sizes are out of range, or the method cannot say the problem.
    """
    limits = limits or Limits()
    costs = CostModel(
        problem.chain,
        problem.cluster,
        problem.semantics,
        problem.memory_model,
        pins=problem.pins,
    )
    check_sums(problem.chain, problem.cluster, problem.microbatches)
    options = options_of(problem, limits)
    history = History(options.clock)
    told = _Listener(history, progress)
    for each in _turns(problem, costs, options):
        state = Incumbent(*each, told)
        for start in warm_starts:
            if not start.recomputes:
                offer_warm_start(state, start)
        with compiling_told(told.compiling):
            solved = _search(problem, limits, state, warm_starts)
        if solved.state.best is not None:
            return solution(solved, tuple(history.steps))
    raise _failure(problem, state)


def _turns(
    problem: Problem, costs: CostModel, options: SearchOptions
) -> Iterator[tuple[CostModel, SearchOptions]]:
    """What is searched, one after the other until there is a plan: states on GPUs, or anywhere."""
    if problem.states == "off":
        yield costs, options
    if problem.states == "needed":
        yield costs, replace(options, time_limit_s=portfolio.ON_GPUS * options.time_limit_s)
    if problem.states != "off":
        yield replace(costs, states_away=True), options


def _search(
    problem: Problem, limits: Limits, state: Incumbent, warm_starts: Sequence[Plan]
) -> SearchResult:
    """What the method says."""
    if problem.method == "paper-ilp":
        return _paper_ilp(state)
    if problem.method in ("full-recompute", "two-phase"):
        return _with_fixed_cuts(problem, state)
    if problem.whole_step and not problem.recompute:
        if isinstance(limits.groups, int):
            state.notes.append("groups of layers are not used where a whole step is planned")
        search.run(state)
        return SearchResult(state)
    _note_periodic(problem, state)
    groups = _groups(state.costs, limits)
    if groups is not None and (problem.recompute or problem.offload or problem.states != "off"):
        state.notes.append(_no_groups(problem))
        groups = None
    if problem.recompute:
        return recompute_search.run(state, warm_starts)
    if groups is not None:
        multilevel.run(state, groups)
        return SearchResult(state)
    search.run(state)
    if not problem.offload:
        search.prove_contiguous(state)
    return SearchResult(state)


def _note_periodic(problem: Problem, state: Incumbent) -> None:
    """Say why no whole step is planned, where a choice of the user's is the reason."""
    if problem.offload and replace(problem, offload=False).whole_step:
        state.notes.append(PERIODIC)
    if replace(problem, microbatches=1).whole_step and not problem.whole_step:
        state.notes.append(LONG_STEP)


def _with_fixed_cuts(problem: Problem, state: Incumbent) -> SearchResult:
    """What others do about recomputation: cuts first, then what is recomputed.

    Raises:
        InfeasibleError: if these cuts have no plan, whatever plan there was to start from.
    """
    full = problem.method == "full-recompute"
    found = baselines.full_recompute(state, problem.stages) if full else baselines.two_phase(state)
    if found is None:
        raise InfeasibleError(
            f"chain {state.costs.chain.name!r}: method {problem.method} has no plan: its stages"
            " exceed some GPU's memory or a link's time at every period. --recompute auto decides"
            " cuts and recomputation together."
        )
    return found


def _groups(costs: CostModel, limits: Limits) -> int | None:
    """How many groups of layers to search on; None for the layers themselves."""
    if limits.groups == "auto":
        return multilevel.automatic(costs)
    if limits.groups is None or limits.groups >= costs.layers:
        return None
    return limits.groups


def _no_groups(problem: Problem) -> str:
    """With recomputation or offloading the layers themselves are searched, never in silence."""
    asked = [f"{name} auto" for name in ("recompute", "offload") if getattr(problem, name)]
    if problem.states == "on":
        asked.append("offload states")
    return (
        f"searched layer by layer although the chain is long: {' and '.join(asked)} knows no"
        " groups (--coarsen)"
    )


def _paper_ilp(state: Incumbent) -> SearchResult:
    """The paper's literal ILP.

    Raises:
        InputError: if its solver is missing, or it cannot say the problem.
    """
    if find_spec("ortools") is None:
        raise InputError(
            "method paper-ilp: got no ortools, need it: pip install 'pipeplan[plan]',"
            " or use --method contiguous."
        )
    from pipeplan.ilp.paper import literal  # only here: contiguous plans need no solver

    literal.search(state)
    return SearchResult(state)


def _failure(problem: Problem, state: Incumbent) -> Exception:
    """The proof that no plan exists, or what the search did instead of finding one."""
    costs = state.costs
    if state.infeasible is not None:
        return InfeasibleError(state.infeasible)
    limit, used = state.options.time_limit_s, state.elapsed
    over = used > TIME_OVER * limit
    if over:
        what = f"no plan within {limit:g} s, and none is ruled out."
    else:
        what = (
            f"no plan found, and none is ruled out: the search ended by itself after {used:.1f} s"
            f" of {limit:g} s."
        )
    ways = infeasibility.suggestions(costs, recompute=problem.recompute, time=over)
    notes = "".join(f" ({note}.)" for note in state.notes)
    return TimeLimitError(
        f"planner: chain {costs.chain.name!r} on {costs.gpus} GPUs: {what} {ways}{notes}"
    )
