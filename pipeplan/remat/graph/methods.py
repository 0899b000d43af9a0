"""The methods by name: each adds orders to what is known, and bounds where it proves any."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from pipeplan.errors import InputError
from pipeplan.remat.graph.brute_force import best_order
from pipeplan.remat.graph.hierarchy.hierarchy import Hierarchy
from pipeplan.remat.graph.intervals.search import IntervalAnswer, SearchLimits, search
from pipeplan.remat.graph.joins.join import JoinChains
from pipeplan.remat.graph.joins.split import LEAST_SHARE, find_join
from pipeplan.remat.graph.knowledge import Search
from pipeplan.remat.graph.ledger import Order
from pipeplan.remat.graph.milp.checkmate import Checkmate
from pipeplan.remat.graph.milp.fb_graph import FbGraph, of_operators
from pipeplan.remat.graph.milp.rk_checkmate import RkCheckmate
from pipeplan.remat.graph.orders import further, tidy
from pipeplan.remat.graph.problem import Budget

MOST_WHOLE = 130
"""Operations of a graph that `auto` also solves as a whole: beyond, bounds stay near 0."""
MOST_PROGRAM = 60
"""Computations of a graph for the integer programs, which grow with their square and more."""
_OPTIONS_SHARE = 0.5
"""Of the time, what options of blocks may take."""


def keep_all(search: Search) -> None:
    """Every operation once."""
    search.add("keep-all", search.ledger.first_order())


def rotor(search: Search) -> None:
    """Whole blocks are kept or run again: RK-Rotor with one option per block."""
    _by_blocks(search, "rotor", keep_all=True)


def rockmate(search: Search) -> None:
    """Options per distinct block, then RK-Rotor (X. Zhao's thesis, Algorithm 3)."""
    options_end = time.monotonic() + _OPTIONS_SHARE * search.left()
    search.chain.solve_options(search.limits, options_end)
    _by_blocks(search, "rockmate", keep_all=False)


def hiremate(search: Search) -> None:
    """Clusters of clusters, each with options, level by level (X. Zhao's thesis, chapter 3).

    With few clusters at the top, then with more, each in an equal share of the time.
    """
    for index, hierarchy in enumerate(search.hierarchies):
        share = search.left() / (len(search.hierarchies) - index)
        _by_clusters(search, hierarchy, time.monotonic() + share)


def _by_clusters(search: Search, hierarchy: Hierarchy, end: float) -> None:
    now = time.monotonic()
    search.say(
        f"hiremate: {len(hierarchy.top)} clusters at the top, {len(hierarchy.distinct)} kinds"
    )
    hierarchy.solve_ways(search.limits, now + _OPTIONS_SHARE * (end - now))
    waiting = sorted(search.budgets, key=_largest_first)
    for index, budget in enumerate(waiting):
        now = time.monotonic()
        until = now + (end - now) / (len(waiting) - index)
        found = hierarchy.orders(budget.peak_bytes, budget.saved_bytes, search.limits, until)
        for order in found:
            search.add("hiremate", order)


def join(search: Search) -> None:
    """Branches that meet in a tail, with options of their blocks (`joins`).

    Raises:
        InputError: if the graph is no join.
    """
    found = find_join(search.ledger)
    if found is None:
        raise InputError(
            f"graph {search.problem.graph.name!r}, method join: found no branches that meet in a"
            f" tail, need two at least, each with {LEAST_SHARE:.0%} of the forward's time. Use"
            " method hiremate."
        )
    chains = JoinChains(search.ledger, found, runs=search.problem.runs)
    chains.solve_options(search.limits, time.monotonic() + _OPTIONS_SHARE * search.left())
    for saved in sorted({each.saved_bytes for each in search.budgets}, key=str):
        peaks = [each.peak_bytes for each in search.budgets if each.saved_bytes == saved]
        orders = chains.orders(peaks, saved)
        for order in orders:
            search.add("join", order)


def least_memory(search: Search) -> None:
    """The order of least peak that options of blocks give; it answers all budgets above."""
    options_end = time.monotonic() + _OPTIONS_SHARE * search.left()
    search.chain.solve_options(search.limits, options_end)
    search.add("least-memory", search.chain.smallest())


def _by_blocks(search: Search, name: str, keep_all: bool) -> None:
    for saved in sorted({each.saved_bytes for each in search.budgets}, key=str):
        peaks = [each.peak_bytes for each in search.budgets if each.saved_bytes == saved]
        for order in search.chain.orders(peaks, saved, keep_all):
            search.add(name, order)


def intervals(search: Search) -> None:
    """The whole graph in CP-SAT, largest budgets first, each from the best order known."""
    waiting = sorted(search.budgets, key=_largest_first)
    for index, budget in enumerate(waiting):
        share = search.left() / (len(waiting) - index)
        limits = SearchLimits(share, search.limits.workers, search.limits.deterministic)
        _interval(search, budget, limits)


def _interval(search: Search, budget: Budget, limits: SearchLimits) -> None:
    from_larger = [
        bound
        for other, bound in search.bounds.items()
        if other.peak_bytes >= budget.peak_bytes and _at_least(other, budget)
    ]
    if None in from_larger:
        search.bounds[budget] = None
        return
    least = max((each for each in from_larger if each is not None), default=0)
    best = search.best(budget)
    if best is not None and further(search.ledger, best[1]) == least:
        search.bounds[budget] = least
        return
    found = _search(search, budget, limits, None if best is None else best[1], least)
    search.bounds[budget] = found.bound_ns
    if found.order is not None and (best is None or found.order != best[1]):
        search.add("intervals", found.order)


def _search(
    asked: Search, budget: Budget, limits: SearchLimits, hint: Order | None, least: int
) -> IntervalAnswer:
    return search(asked.slots, budget.peak_bytes, budget.saved_bytes, limits, hint, least_ns=least)


def _at_least(one: Budget, other: Budget) -> bool:
    """Whether one budget allows as many saved bytes as another."""
    if one.saved_bytes is None:
        return True
    return other.saved_bytes is not None and one.saved_bytes >= other.saved_bytes


def _largest_first(budget: Budget) -> tuple[int, bool, int]:
    saved = budget.saved_bytes
    return -budget.peak_bytes, saved is not None, -(saved or 0)


def brute_force(search: Search) -> None:
    """All orders; for tests."""
    for budget in search.budgets:
        order = best_order(search.slots, budget.peak_bytes, budget.saved_bytes)
        search.bounds[budget] = None if order is None else further(search.ledger, order)
        search.add("brute-force", order)


def checkmate(search: Search) -> None:
    """Checkmate's program: storages of an operation together, no workspace, no saved bytes.

    Its schedules are within a budget where the judge says so; it proves nothing of this class.
    """
    for budget in search.budgets:
        room = budget.peak_bytes - search.ledger.constant
        _by_program(search, "checkmate", partial(Checkmate, budget=room))


def rk_checkmate(search: Search) -> None:
    """RK-Checkmate's program; any forward may run again in every stage."""
    for budget in search.budgets:
        room = budget.peak_bytes - search.ledger.constant
        program = partial(RkCheckmate, peak=room, saved=budget.saved_bytes)
        _by_program(search, "rk-checkmate", program)


def _by_program(
    search: Search, name: str, make: Callable[[FbGraph], Checkmate | RkCheckmate]
) -> None:
    count = len(search.ledger.first_order())
    if count > MOST_PROGRAM:
        raise InputError(
            f"graph {search.problem.graph.name!r}, method {name}: got {count} computations, need"
            f" at most {MOST_PROGRAM}. Use method intervals or rockmate."
        )
    graph = of_operators(search.ledger, range(search.problem.graph.forwards))
    found = make(graph).solve(seconds=min(search.limits.seconds, search.left()))
    if found.objective is not None:
        search.add(name, tidy(search.ledger, graph.order(found.runs)))


def auto(search: Search) -> None:
    """Everything once, blocks kept or not, options of blocks, and small graphs as a whole."""
    keep_all(search)
    waiting = [each for each in search.budgets if search.best(each) is None]
    if not waiting:
        return
    rotor(search)
    rockmate(search)
    if len(search.problem.graph.operations) <= MOST_WHOLE:
        intervals(search)


METHODS: dict[str, Callable[[Search], None]] = {
    "auto": auto,
    "keep-all": keep_all,
    "rotor": rotor,
    "rockmate": rockmate,
    "hiremate": hiremate,
    "join": join,
    "least-memory": least_memory,
    "intervals": intervals,
    "checkmate": checkmate,
    "rk-checkmate": rk_checkmate,
    "brute-force": brute_force,
}
