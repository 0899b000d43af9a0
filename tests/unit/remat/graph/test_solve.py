"""The door: methods by name, answers at budgets, what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from pipeplan.errors import InputError
from pipeplan.operator_graph import Operation, Phase
from pipeplan.remat.graph import (
    CURVE,
    METHODS,
    Budget,
    GraphProblem,
    Pareto,
    SearchLimits,
    graph_budgets,
    graph_curve,
    solve,
)
from pipeplan.remat.graph.hierarchy import solve_level
from pipeplan.remat.graph.intervals.search import run_model
from pipeplan.remat.graph.ledger import Ledger
from pipeplan.remat.programs import judge, keep_all
from pipeplan.testing.joint_graphs import Gpt, gpt_graph
from pipeplan.testing.random_graphs import random_graph
from tests import grids
from tests.unit.remat.graph.test_joins import UNEQUAL

FEW = SearchLimits(20, deterministic=0.2)
SMALL = Gpt(2, width=16, heads=2, tokens=8, batch=2, vocabulary=16, fused=True)


def _times(found: Pareto) -> list[int | None]:
    return [each.option and each.option.outcome.compute_ns for each in found.answers]


@grids.each_value(seed=range(6), anywhere=[False, True])
def test_exact_methods_agree(seed: int, anywhere: bool) -> None:
    """Intervals and auto give brute force's times at every budget, and prove them."""
    problem = GraphProblem(random_graph(seed, 4, 3), anywhere=anywhere)
    outcome = judge(problem.graph, keep_all(problem.graph))
    peak, saved = outcome.peak_bytes, outcome.saved_bytes
    budgets = [
        Budget(peak - less, limit)
        for less in range(0, peak // 2, 3)
        for limit in (None, saved - 3)
    ]
    exact = solve(problem, budgets, method="brute-force")
    for method in ("intervals", "auto"):
        found = solve(problem, budgets, method=method)
        assert _times(found) == _times(exact)
        assert all(each.proven for each in found.answers)
    for answer in exact.answers:
        assert answer.option is None or answer.option.within(answer.budget)


def test_sweeps_are_monotone() -> None:
    """20 budgets: more is never slower, and no peak is above what was asked."""
    problem = GraphProblem(gpt_graph(SMALL))
    outcome = judge(problem.graph, keep_all(problem.graph))
    static = problem.graph.static_bytes
    moving = outcome.peak_bytes - static
    budgets = [Budget(static + moving * share // 20) for share in range(1, 21)]
    found = solve(problem, budgets, deadline_s=30, method="rockmate")
    times = [each for each in _times(found) if each is not None]
    assert len(times) > 8
    assert times == sorted(times, reverse=True)
    for answer in found.answers:
        if answer.option is not None:
            assert answer.option.outcome.peak_bytes <= answer.budget.peak_bytes
            assert answer.gap is not None
            assert answer.gap >= 0
    assert len(found.options) <= len(set(times))


@pytest.mark.parametrize("method", [each for each in METHODS if each != "least-memory"])
def test_every_method_answers(method: str) -> None:
    """At the peak without a plan all methods run every operation once."""
    if method in ("brute-force", "checkmate", "rk-checkmate"):
        problem = GraphProblem(random_graph(2, 4, 3, plain=True))
    elif method == "join":
        problem = GraphProblem(UNEQUAL)
    else:
        problem = GraphProblem(gpt_graph(SMALL))
    outcome = judge(problem.graph, keep_all(problem.graph))
    (answer,) = solve(problem, [Budget(outcome.peak_bytes)], 30, method).answers
    assert answer.option is not None
    assert answer.option.outcome.compute_ns == problem.graph.compute_ns
    assert answer.proven


@functools.cache
def budgets_of_small() -> tuple[int, ...]:
    """Of the small GPT, from the least peak found to that of all that is kept."""
    return graph_budgets(gpt_graph(SMALL), 3, 60)


def test_the_least_memory_is_below_all_others() -> None:
    """No method has a program below it; it answers every budget from its peak on."""
    problem = GraphProblem(gpt_graph(SMALL))
    least = budgets_of_small()[0]
    assert least < judge(problem.graph, keep_all(problem.graph)).peak_bytes
    budgets = [Budget(least - 1), Budget(least)]
    below, at = solve(problem, budgets, 20, "least-memory").answers
    assert below.option is None
    assert at.option is not None
    assert at.option.outcome.peak_bytes == least
    for method in ("rotor", "rockmate"):
        (answer,) = solve(problem, budgets[:1], 20, method).answers
        assert answer.option is None


def test_a_curve_goes_from_the_least_to_all() -> None:
    """Ours is as fast as every other method at every budget."""
    graph = gpt_graph(SMALL)
    limits = budgets_of_small()
    assert limits[-1] == judge(graph, keep_all(graph)).peak_bytes
    lines: list[str] = []
    found = graph_curve(graph, limits, 10, lines.append)
    assert lines == [f"curve: {method}" for method in CURVE]
    for place in range(len(limits)):
        times = {
            method: answers[place].option.outcome.compute_ns
            for method, answers in found.items()
            if answers[place].option is not None
        }
        assert times["auto"] == min(times.values())


def test_refusals() -> None:
    """Unknown methods, no budgets and graphs that are too large say what is needed."""
    problem = GraphProblem(gpt_graph(SMALL))
    with pytest.raises(InputError, match="rockmate"):
        solve(problem, [Budget(1)], method="other")
    with pytest.raises(InputError, match="at least one"):
        solve(problem, [])
    with pytest.raises(InputError, match="at most 7"):
        solve(problem, [Budget(1)], method="brute-force")


def test_integer_programs_by_name() -> None:
    """They are as good as intervals where forwards run as often as they like."""
    problem = GraphProblem(random_graph(4, 4, 3, plain=True), runs=7, anywhere=True)
    peak = judge(problem.graph, keep_all(problem.graph)).peak_bytes
    budgets = [Budget(peak - less) for less in (0, 2, 4, 6)]
    exact = solve(problem, budgets, method="intervals")
    for method in ("checkmate", "rk-checkmate"):
        assert _times(solve(problem, budgets, method=method)) == _times(exact)
    with pytest.raises(InputError, match="at most 60"):
        solve(GraphProblem(gpt_graph(SMALL)), budgets, method="rk-checkmate")


@pytest.mark.parametrize("seed", range(8))
def test_no_program_is_below_the_least_peak(seed: int) -> None:
    """An operation holds what it reads and makes; every method proves that less is too little."""
    problem = GraphProblem(random_graph(seed, 4, 3))
    least = Ledger(problem.graph).least_peak
    budgets = [Budget(least - 1), Budget(2 * least)]
    for method in ("brute-force", "auto", "rockmate", "rotor", "keep-all"):
        below, above = solve(problem, budgets, 20, method).answers
        assert below.option is None
        assert below.proven
        assert above.option is None or above.option.outcome.peak_bytes >= least


def test_nothing_fits() -> None:
    """Below all that any program needs there is no option, and intervals prove it."""
    problem = GraphProblem(random_graph(1, 4, 3))
    (answer,) = solve(problem, [Budget(1)], method="intervals").answers
    assert answer.option is None
    assert answer.bound_ns is None
    assert answer.proven


def test_an_interrupted_search_keeps_its_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C behind the first order keeps it; without one, or without a listener, it is raised."""
    graph = gpt_graph(SMALL)
    outcome = judge(graph, keep_all(graph))
    budgets = [Budget(outcome.peak_bytes * 4 // 5)]
    heard: list[str] = []

    def interrupted(status: bool) -> Callable[..., object]:
        def run(model: object, limits: object, linearization: int = 0) -> object:
            if linearization and (status or len(heard) > 1):
                raise KeyboardInterrupt
            return run_model(model, limits, linearization)  # type: ignore[arg-type]

        return run

    monkeypatch.setattr(solve_level, "run_model", interrupted(False))
    (answer,) = solve(GraphProblem(graph), budgets, 60, "hiremate", FEW, heard.append).answers
    assert answer.option is not None
    assert answer.option.within(budgets[0])
    assert 0 < (answer.gap or 0) < 0.5
    told = f"hiremate: {answer.gap:.2%} over every operation once"
    assert heard[1:] == [told, "interrupted: the best so far"]
    monkeypatch.setattr(solve_level, "run_model", interrupted(True))
    for say in (heard.append, None):
        with pytest.raises(KeyboardInterrupt):
            solve(GraphProblem(graph), budgets, 60, "hiremate", FEW, say)


def test_a_storage_with_two_makers_is_refused() -> None:
    """The judge knows ways to make a storage; a search would free one way's for the other."""
    graph = random_graph(2, 4, 3)
    first, *others = graph.operations
    twice = first.model_copy(update={"name": "again"})
    broken = graph.model_copy(update={"operations": (first, twice, *others)})
    with pytest.raises(
        InputError, match=r"operations\[1\].writes: got storage 2, which operations"
    ):
        solve(GraphProblem(broken), [Budget(1000)])


def test_a_whole_step_is_refused() -> None:
    """Planners count one micro-batch; updates belong to plans of states."""
    graph = random_graph(2, 4, 3)
    update = Operation(name="u", phase=Phase.UPDATE, reads=(), writes=(), time_ns=1)
    step = graph.model_copy(update={"operations": (*graph.operations, update)})
    with pytest.raises(InputError, match=r"operations\[7\].phase: got U, an update, need the"):
        solve(GraphProblem(step), [Budget(1000)])
