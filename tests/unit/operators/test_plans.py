"""Plans of captured modules: within their budgets when they run, bits as the plain module's."""

from __future__ import annotations

import pytest

from pipeplan.operators import by_operators
from pipeplan.remat.graph import Budget, GraphProblem, SearchLimits, solve
from pipeplan.remat.graph.ledger import Ledger
from pipeplan.remat.programs import judge, keep_all
from tests.operator_models import MODELS
from tests.operator_steps import step
from tests.unit.operators.test_bits_and_bytes import found

OFTEN = ("resnet",)
"""Of every test run; the others are long."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[] if each in OFTEN else pytest.mark.long) for each in MODELS],
)
def test_plans_run_within_their_budget(name: str) -> None:
    """The smallest of the budgets that has a plan: executed bytes are the judge's, bits too."""
    chosen, captured, plain = found(name)
    graph = captured.graph
    kept = judge(graph, keep_all(graph))
    moving = kept.peak_bytes - graph.static_bytes
    budgets = [Budget(graph.static_bytes + moving * share // 20) for share in (20, 15, 10)]
    limits = SearchLimits(seconds=5, deterministic=0.2)
    answers = solve(GraphProblem(graph), budgets, 8, "rockmate", limits).answers
    options = [answer.option for answer in answers if answer.option is not None]
    assert options
    times = [option.outcome.compute_ns for option in options]
    assert times == sorted(times)
    assert options[-1].outcome.peak_bytes <= budgets[len(options) - 1].peak_bytes
    module = by_operators(chosen.module, captured, options[-1].program)
    done, peak = step(module, chosen, [tensor for _, tensor in captured.constants])
    assert done.differs(plain) == []
    assert peak == options[-1].outcome.peak_bytes


JOINED = {"t5": False, "u-net": False, "siamese": True, "densenet": False}
"""Models that are no chains, and whether every test run takes them: an encoder-decoder, skips, two
towers, layers that read all before them."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[] if kept else pytest.mark.long) for each, kept in JOINED.items()],
)
def test_hiremate_runs_within_its_budget(name: str) -> None:
    """What is joined by levels runs: executed bytes are the judge's, bits the plain module's."""
    _runs_halfway(name, "hiremate")


@pytest.mark.parametrize("name", ["siamese", "cross-modal"])
def test_joins_run_within_their_budget(name: str) -> None:
    """Two towers, with shared weights and without, each by itself; then all that reads both."""
    _runs_halfway(name, "join")


def _runs_halfway(name: str, method: str) -> None:
    """A program between the least peak and that of keeping all: its bytes, its bits."""
    chosen, captured, plain = found(name)
    graph = captured.graph
    kept = judge(graph, keep_all(graph)).peak_bytes
    peak = (kept + max(graph.static_bytes, Ledger(graph).least_peak)) // 2
    limits = SearchLimits(seconds=20, deterministic=0.2)
    (answer,) = solve(GraphProblem(graph), [Budget(peak)], 60, method, limits).answers
    assert answer.option is not None
    assert answer.option.outcome.compute_ns > graph.compute_ns
    module = by_operators(chosen.module, captured, answer.option.program)
    done, bytes_ = step(module, chosen, [tensor for _, tensor in captured.constants])
    assert done.differs(plain) == []
    assert bytes_ == answer.option.outcome.peak_bytes <= peak
