"""Checkmate's and RK-Checkmate's programs: optima, families of constraints, phantoms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeplan.remat.graph.intervals.search import SearchLimits, search
from pipeplan.remat.graph.intervals.slots import Slots
from pipeplan.remat.graph.ledger import Ledger
from pipeplan.remat.graph.milp import checkmate, rk_checkmate
from pipeplan.remat.graph.milp.checkmate import Checkmate
from pipeplan.remat.graph.milp.fb_graph import FbGraph, Phantom, of_operators
from pipeplan.remat.graph.milp.rk_checkmate import RkCheckmate
from pipeplan.remat.graph.order_program import program
from pipeplan.remat.graph.orders import further, peak_bytes, saved_bytes, tidy
from pipeplan.remat.programs import judge
from pipeplan.testing.random_graphs import random_graph
from tests import grids
from tests.integer_programs import excludes


def _any_run(ledger: Ledger) -> Slots:
    """Every operation may run again in every stage, as the programs have it."""
    count = len(ledger.graph.operations)
    return Slots(ledger, (count,) * count)


@pytest.mark.parametrize("solver", ["highs", "scip"])
@grids.first(2, seed=range(6))
def test_rk_checkmate_is_the_intervals_optimum(seed: int, solver: str) -> None:
    """Same class of orders, same bytes: same optimum at every pair of budgets, by the judge."""
    ledger = Ledger(random_graph(seed, 3, 2))
    graph, slots = of_operators(ledger), _any_run(ledger)
    first = ledger.first_order()
    peak, saved = peak_bytes(ledger, first), saved_bytes(ledger, first)
    for less in (0, 2, 4, 6):
        for limit in (None, saved // 2):
            room = peak - less - ledger.constant
            exact = search(slots, peak - less, limit, SearchLimits(60))
            found = RkCheckmate(graph, room, limit).solve(solver)
            assert exact.proven
            assert found.proven
            assert found.objective == exact.bound_ns
            if found.objective is None:
                continue
            order = tidy(ledger, graph.order(found.runs))
            outcome = judge(ledger.graph, program(ledger, order), peak - less)
            assert not outcome.violations
            assert limit is None or outcome.saved_bytes <= limit
            assert further(ledger, order) <= found.objective


@pytest.mark.parametrize("solver", ["highs", "scip"])
@grids.first(2, seed=range(6))
def test_checkmate_is_the_intervals_optimum(seed: int, solver: str) -> None:
    """Where every operation makes one storage and takes no workspace, bytes mean the same."""
    ledger = Ledger(random_graph(seed, 3, 3, plain=True))
    graph, slots = of_operators(ledger), _any_run(ledger)
    peak = peak_bytes(ledger, ledger.first_order())
    for less in (0, 2, 4, 6):
        exact = search(slots, peak - less, None, SearchLimits(60))
        found = Checkmate(graph, peak - less - ledger.constant).solve(solver)
        assert exact.proven
        assert found.proven
        assert found.objective == exact.bound_ns
        if found.objective is not None:
            order = tidy(ledger, graph.order(found.runs))
            outcome = judge(ledger.graph, program(ledger, order), peak - less)
            assert not outcome.violations


def test_checkmate_ignores_workspace() -> None:
    """Its schedule may take more than its budget: what RK-Checkmate was made for."""
    plain = random_graph(0, 3, 2, plain=True)
    operations = tuple(each.model_copy(update={"workspace_bytes": 5}) for each in plain.operations)
    ledger = Ledger(plain.model_copy(update={"operations": operations}))
    graph = of_operators(ledger)
    room = peak_bytes(ledger, ledger.first_order()) - 5 - ledger.constant
    blind = Checkmate(graph, room).solve()
    assert blind.objective is not None
    order = tidy(ledger, graph.order(blind.runs))
    assert peak_bytes(ledger, order) - ledger.constant > room
    seeing = RkCheckmate(graph, room).solve()
    assert seeing.objective is None or seeing.objective > blind.objective


CHAIN = FbGraph(
    time=(3, 5, 0, 4, 4),
    workspace=(0, 0, 0, 0, 2),
    sizes=(4, 3, 1, 2, 2),
    parents=((0,), (1,), (2,), (3,), (4,)),
    children=((1, 4), (2, 3), (3,), (4,), ()),
    loss=2,
    names=(0, 1, -1, 2, 3),
)
"""Two forwards, the loss, two backwards; the first value is read by the last backward."""
PHANTOMS = replace(
    CHAIN,
    children=((1,), (2, 3), (3,), (4,), ()),
    phantoms=(Phantom(6, 0, 4),),
)
"""The same where the last backward needs the first forward's phantom in its place."""


SUM = FbGraph(
    time=(2, 3, 0, 1),
    workspace=(0, 0, 0, 0),
    sizes=(4, 1),
    parents=((0, 1), (3,)),
    children=((2, 3), ()),
    loss=2,
    names=(0, 1, -1, 2),
)
"""Two forwards contribute to one allocation, which the backward reads."""


def _chain(family: str) -> RkCheckmate:
    return RkCheckmate(CHAIN, 10, 4, family)


def _phantoms(family: str) -> RkCheckmate:
    return RkCheckmate(PHANTOMS, 16, 9, family)


def _sum(family: str) -> RkCheckmate:
    return RkCheckmate(SUM, 5, None, family)


_IMPLIED = {"not_saved_before_made", "allocated_where_saved", "saved_where_allocated"}
"""(2.4) follows from (2.12) and P, which starts empty; (2.11) and (2.12) from each other where all
variables are 0 or 1: they differ in relaxations alone."""


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(each, marks=pytest.mark.long if each in _IMPLIED else ())
        for each in rk_checkmate.FAMILIES
    ],
)
def test_every_family_of_rk_checkmate_counts(family: str) -> None:
    """Each rules out what all others allow, but those that follow from others."""
    rules = any(excludes(make, family) for make in (_sum, _phantoms, _chain))
    assert rules is (family not in _IMPLIED)


@pytest.mark.parametrize("family", checkmate.FAMILIES)
def test_every_family_of_checkmate_counts(family: str) -> None:
    """Each rules out what all others allow."""
    assert excludes(lambda name: Checkmate(CHAIN, 10, name), family)


def test_phantoms_are_kept_or_made_again() -> None:
    """Kept from forward to backward the phantom costs nothing; without room it is made again."""
    ample = RkCheckmate(PHANTOMS, 100).solve()
    assert ample.objective == 0
    assert ample.runs == (0, 1, 2, 3, 4)
    tight = RkCheckmate(PHANTOMS, 100, 4).solve()
    assert tight.objective == PHANTOMS.time[0]
    assert sorted(tight.runs) == [0, 0, 1, 2, 3, 4]


def test_fast_forward_takes_no_phantom() -> None:
    """R' leaves nothing behind: with the phantom the second forward would not fit."""
    graph = replace(PHANTOMS, phantoms=(Phantom(9, 0, 4),))
    peak = 15
    found = RkCheckmate(graph, peak, 4).solve()
    assert found.objective == graph.time[0]
    assert graph.sizes[0] + 9 + graph.sizes[1] > peak


def test_several_parents_of_an_allocation() -> None:
    """A sum that two computations contribute to is there once both have run (2.8), (2.11)."""
    ample = RkCheckmate(SUM, 5).solve()
    assert (ample.objective, ample.runs) == (0, (0, 1, 2, 3))
    tight = RkCheckmate(SUM, 5, 0).solve()
    assert tight.objective == SUM.time[0] + SUM.time[1]
