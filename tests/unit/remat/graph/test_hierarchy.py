"""HiRemate: what a level sees of its clusters, levels in interval form, whole plans."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from pipeplan.operator_graph import OperatorGraph
from pipeplan.remat.graph import Budget, GraphProblem, SearchLimits, solve
from pipeplan.remat.graph.blocks.options import BlockOption
from pipeplan.remat.graph.hierarchy.h_partition import Sizes
from pipeplan.remat.graph.hierarchy.hierarchy import Hierarchy
from pipeplan.remat.graph.hierarchy.ways import ClusterWay, best_ways, selected
from pipeplan.remat.graph.intervals.search import search
from pipeplan.remat.graph.intervals.slots import Slots, runs_of
from pipeplan.remat.graph.ledger import Ledger
from pipeplan.remat.graph.order_program import program
from pipeplan.remat.graph.orders import further, peak_bytes, saved_bytes
from pipeplan.remat.programs import judge
from pipeplan.testing.joint_graphs import Gpt, gpt_graph
from pipeplan.testing.random_graphs import paired_graph, random_graph
from tests import grids

GPT = Gpt(3, width=16, heads=2, tokens=8, batch=2, vocabulary=16)
LIMITS = SearchLimits(20, deterministic=0.5)
LEVELS = Sizes(top=4, lower=3, operations=3)
FLAT = Sizes(top=99)


def solved(graph: OperatorGraph, sizes: Sizes) -> Hierarchy:
    """With ways of all clusters."""
    found = Hierarchy(Ledger(graph), sizes, count=3)
    found.solve_ways(LIMITS, time.monotonic() + 100)
    return found


@grids.first(2, seed=range(4))
def test_a_level_of_operations_is_the_interval_form(seed: int) -> None:
    """A cluster per forward has one way: the level's optimum is that of the whole graph."""
    hierarchy = solved(paired_graph(seed, 6), FLAT)
    ledger, highest = hierarchy.ledger, hierarchy.highest
    slots = Slots(ledger, runs_of(ledger, 2), behind=True)
    room = peak_bytes(ledger, ledger.first_order()) - ledger.constant
    for peak in range(room, 2 * room // 3, -4):
        exact = search(slots, peak + ledger.constant, None, SearchLimits(20))
        found = highest.solve(peak, None, SearchLimits(20))
        assert exact.proven
        if found is None:
            assert exact.order is None
            continue
        assert found.proven
        assert found.further_ns == exact.bound_ns
        order = highest.level.order(found.runs, found.ways)
        assert further(ledger, order) <= found.further_ns
        assert not judge(ledger.graph, program(ledger, order), peak + ledger.constant).violations


@grids.first(2, seed=range(4))
def test_levels_count_at_least_what_their_orders_take(seed: int) -> None:
    """Two and three levels: bytes, saved bytes and time of the order are within what was given."""
    hierarchy = solved(paired_graph(seed, 12), LEVELS)
    ledger, highest = hierarchy.ledger, hierarchy.highest
    first = ledger.first_order()
    room, kept = peak_bytes(ledger, first) - ledger.constant, saved_bytes(ledger, first)
    answered = 0
    for peak, saved in [(room, None), (9 * room // 10, None), (room, kept // 2)]:
        found = highest.solve(peak, saved, LIMITS)
        if found is None:
            continue
        answered += 1
        order = highest.level.order(found.runs, found.ways)
        outcome = judge(ledger.graph, program(ledger, order), peak + ledger.constant)
        assert not outcome.violations
        assert saved is None or outcome.saved_bytes <= saved
        assert further(ledger, order) <= found.further_ns
    assert answered > 1


@grids.first(2, seed=range(4))
def test_a_way_leaves_the_interface_to_its_level(seed: int) -> None:
    """Of a whole graph: nothing of the forward, of the backward at most outputs and tangents."""
    ledger = Ledger(random_graph(seed, 5, 4))
    order = ledger.first_order()
    way, option = ClusterWay.of(ledger, order), BlockOption.of(ledger, order)
    assert (way.forward_peak, way.saved) == (option.forward_peak, option.saved)
    assert way.forward_ns + way.backward_ns == option.time_ns
    interface = sum(ledger.size[s] for s in (*ledger.outputs, *ledger.tangents))
    assert option.backward_peak - interface <= way.backward_peak <= option.backward_peak
    outside = {0, 1, *ledger.outputs}
    backward = [ledger.graph.operations[at] for at in way.backward]
    assert way.reads == outside & {s for each in backward for s in each.reads}


def test_few_ways_are_far_apart() -> None:
    """The fastest is kept, and those whose saved bytes differ most (section 3.4.5)."""
    ledger = Ledger(random_graph(0, 4, 3))
    first = ClusterWay.of(ledger, ledger.first_order())
    ways = [replace(first, saved=saved, backward_ns=10 - saved) for saved in (9, 8, 5, 1, 0)]
    assert [each.saved for each in selected(ways, 3)] == [9, 5, 0]
    assert selected(ways, 9) == tuple(ways)
    assert len(best_ways(ledger, [ledger.first_order()] * 2, 4)) == 1


@pytest.mark.parametrize("sizes", [Sizes(top=12), LEVELS])
def test_any_depth_keeps_budgets(sizes: Sizes) -> None:
    """Two levels or many: judged, within the peak, and more is never slower (Figure 3.14)."""
    graph = gpt_graph(GPT)
    hierarchy = solved(graph, sizes)
    ledger = hierarchy.ledger
    moving = peak_bytes(ledger, ledger.first_order()) - ledger.constant
    times = []
    for share in (10, 8, 6):
        peak = ledger.constant + moving * share // 10
        *_, order = hierarchy.orders(peak, None, LIMITS, time.monotonic() + 100)
        outcome = judge(graph, program(ledger, order), peak)
        assert not outcome.violations
        times.append(outcome.compute_ns)
    assert times[0] == graph.compute_ns
    assert times == sorted(times)
    assert times[-1] < 1.2 * graph.compute_ns


def test_identical_clusters_are_solved_once() -> None:
    """The kinds of clusters do not grow with the layers."""
    kinds = []
    for layers in (9, 12):
        ledger = Ledger(gpt_graph(replace(GPT, layers=layers)))
        kinds.append(len(Hierarchy(ledger, Sizes(top=20)).distinct))
    assert kinds[1] <= kinds[0] + 2


def test_within_saved_bytes() -> None:
    """The pair of budgets of RK-Checkmate, by the door."""
    problem = GraphProblem(gpt_graph(replace(GPT, layers=2)))
    (whole,) = solve(problem, [Budget(10**9)], 20, "keep-all").answers
    assert whole.option is not None
    outcome = whole.option.outcome
    budget = Budget(outcome.peak_bytes, outcome.saved_bytes // 2)
    (answer,) = solve(problem, [budget], 60, "hiremate", LIMITS).answers
    assert answer.option is not None
    assert answer.option.method == "hiremate"
    assert answer.option.within(budget)
    assert answer.option.outcome.compute_ns > problem.graph.compute_ns
