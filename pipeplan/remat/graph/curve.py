"""Time over budget: methods side by side, from the least memory found to all that is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from pipeplan.operator_graph import OperatorGraph
from pipeplan.remat.graph.problem import Answer, Budget, GraphProblem
from pipeplan.remat.graph.solve import solve
from pipeplan.remat.programs import judge, keep_all

CURVE = ("keep-all", "rotor", "rockmate", "auto", "least-memory")
"""The methods of a curve."""


def graph_budgets(graph: OperatorGraph, count: int, seconds: float) -> tuple[int, ...]:
    """`count` budgets in bytes, evenly from the least peak found to that of keeping everything.

    Args:
        graph: with times.
        count: at least 2.
        seconds: for the search of the least peak.
    """
    high = judge(graph, keep_all(graph)).peak_bytes
    low = least_peak(graph, seconds)
    return tuple(low + (high - low) * at // max(1, count - 1) for at in range(count))


def least_peak(graph: OperatorGraph, seconds: float) -> int:
    """Bytes of the program of least peak that is found within `seconds`."""
    high = judge(graph, keep_all(graph)).peak_bytes
    (answer,) = solve(GraphProblem(graph), [Budget(high)], seconds, "least-memory").answers
    return high if answer.option is None else answer.option.outcome.peak_bytes


def graph_curve(
    graph: OperatorGraph,
    limits: Sequence[int],
    seconds: float,
    say: Callable[[str], None],
    methods: Sequence[str] = CURVE,
) -> dict[str, tuple[Answer, ...]]:
    """What each method finds at each of `limits`, bytes, within `seconds` a method."""
    found = {}
    for method in methods:
        say(f"curve: {method}")
        budgets = [Budget(limit) for limit in limits]
        found[method] = solve(GraphProblem(graph), budgets, seconds, method).answers
    return auto_of_all(found)


def auto_of_all(found: Mapping[str, tuple[Answer, ...]]) -> dict[str, tuple[Answer, ...]]:
    """`found`, answers by method, in which auto has the fastest of all at each budget.

    It tries the others, too: what they found with more time for themselves counts for it.
    """
    if "auto" not in found:
        return dict(found)
    fastest = tuple(min(each, key=_time) for each in zip(*found.values(), strict=True))
    return {**found, "auto": fastest}


def _time(answer: Answer) -> float:
    return float("inf") if answer.option is None else answer.option.outcome.compute_ns
