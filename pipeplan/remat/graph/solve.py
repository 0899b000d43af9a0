"""The door: programs of a graph within budgets, each judged before it is handed out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from pipeplan.errors import InputError, InternalError
from pipeplan.operator_graph import OperatorGraph, Phase
from pipeplan.remat.graph.intervals.search import SearchLimits
from pipeplan.remat.graph.knowledge import Search
from pipeplan.remat.graph.methods import METHODS
from pipeplan.remat.graph.order_program import program
from pipeplan.remat.graph.problem import Answer, Budget, GraphProblem, Option, Pareto
from pipeplan.remat.programs import judge
from pipeplan.sums import check_graph_sums

SECONDS = 60.0
"""What a call may take where nothing else is said."""


def solve(
    problem: GraphProblem,
    budgets: Sequence[Budget],
    deadline_s: float = SECONDS,
    method: str = "auto",
    limits: SearchLimits | None = None,
    say: Callable[[str], None] | None = None,
) -> Pareto:
    """The fastest programs found within each pair of budgets, with bounds where any is proven.

    A program found for one budget answers every other one that it keeps: a larger budget is never
    slower.

    Args:
        problem: a graph and how often its operations may run.
        budgets: pairs of budgets; all of them are answered together.
        deadline_s: seconds for all.
        method: a name in `METHODS`.
        limits: of one search by CP-SAT; its default is a sixth of the deadline, one worker.
        say: hears of progress. Where it is given, Ctrl-C ends the search with what is known, if
            anything is.

    Raises:
        InputError: if there is no such method, no budget, an update in the graph, a storage that
            two operations make, numbers that nobody can add, or a graph too large for the method.
        KeyboardInterrupt: on Ctrl-C where no program is known, or nobody hears of progress.
    """
    if method not in METHODS:
        raise InputError(f"method: got {method!r}, need one of {', '.join(METHODS)}")
    if not budgets:
        raise InputError("budgets: got none, need at least one pair of peak and saved bytes")
    _check_micro_batch(problem.graph)
    check_graph_sums(problem.graph)
    end = time.monotonic() + deadline_s
    search = Search(problem, tuple(budgets), end, limits or SearchLimits(deadline_s / 6))
    if say is None:
        METHODS[method](search)
    else:
        search.say = say
        _keep_best(search, method)
    return Pareto(tuple(_answer(search, budget) for budget in budgets))


def _check_micro_batch(graph: OperatorGraph) -> None:
    """Refuse a graph of a whole step, and one that says in several ways how a storage is made.

    Raises:
        InputError: names the operation.
    """
    makers: dict[int, int] = {}
    for index, operation in enumerate(graph.operations):
        where = f"graph {graph.name!r}: operations[{index}]"
        if operation.phase is Phase.UPDATE:
            raise InputError(
                f"{where}.phase: got U, an update, need the operations of one micro-batch. Leave"
                " updates out."
            )
        for storage in operation.writes:
            if storage in makers:
                raise InputError(
                    f"{where}.writes: got storage {storage}, which operations[{makers[storage]}]"
                    " makes, need one operation that does. Give each its own storage."
                )
            makers[storage] = index


def _keep_best(search: Search, method: str) -> None:
    """Search until it ends or Ctrl-C ends it.

    Raises:
        KeyboardInterrupt: if no program is known within any budget.
    """
    try:
        METHODS[method](search)
    except KeyboardInterrupt:
        if all(search.best(budget) is None for budget in search.budgets):
            raise
        search.say("interrupted: the best so far")


def _answer(search: Search, budget: Budget) -> Answer:
    """The best of what is known, by the judge, and the bound of the budget."""
    once = search.problem.graph.compute_ns
    best = search.best(budget)
    further = search.bounds.get(budget, 0)
    if best is None and budget.peak_bytes < search.ledger.least_peak:
        return Answer(budget, None, None, proven=True)
    if best is None:
        return Answer(budget, None, None if further is None else once + further, further is None)
    option = _option(search, *best)
    if not option.within(budget):
        raise InternalError(
            f"{option.method}: its program holds {option.outcome.peak_bytes} bytes and saves"
            f" {option.outcome.saved_bytes}, need {budget}. This is a bug of pipeplan; please"
            " report it with the graph."
        )
    # An order of another class may be within a budget that none of this class is within.
    bound = once + min(further or 0, option.outcome.compute_ns - once)
    return Answer(budget, option, bound, bound == option.outcome.compute_ns)


def _option(search: Search, method: str, order: tuple[int, ...]) -> Option:
    found = program(search.ledger, order)
    outcome = judge(search.problem.graph, found)
    if outcome.violations:
        raise InternalError(
            f"{method}: its program breaks a rule: {outcome.violations[0]}. This is a bug of"
            " pipeplan; please report it with the graph."
        )
    return Option(method, found, outcome)
