"""Programs of one operator graph for several budgets, none better than another in everything."""

from __future__ import annotations

from dataclasses import dataclass

from pipeplan.operator_graph import OperatorGraph
from pipeplan.remat.graph import Budget, GraphProblem, Option, front, solve
from pipeplan.remat.programs import ProgramOutcome, judge, keep_all

_SAVED = (0.75, 0.55, 0.4, 0.25, 0.12, 0.0)
"""Shares of what is saved where everything is kept."""
_PEAKS = ((0.85, None), (0.85, 0), (0.7, 0))
"""Shares of the peak of that, and what may be saved."""
_ROOM = 2
"""Peaks where the saved bytes alone are limited: some programs save less by needing more."""


@dataclass(frozen=True)
class GraphOptions:
    """Programs of a graph, and what it takes without one."""

    usual: ProgramOutcome
    """Of the program that keeps everything."""
    found: tuple[Option, ...]
    """Fastest first."""


def graph_options(graph: OperatorGraph, seconds: float) -> GraphOptions:
    """Programs between keeping all and the least.

    Args:
        graph: with times.
        seconds: for the search.
    """
    program = keep_all(graph)
    usual = judge(graph, program)
    found: list[Option] = []
    if usual.saved_bytes:
        answers = solve(GraphProblem(graph), _budgets(graph, usual), seconds).answers
        found = [each.option for each in answers if each.option is not None]
    # Keeping all is an option, too: a graph keeps less than autograd does.
    return GraphOptions(usual, front([Option("keep-all", program, usual), *found]))


def _budgets(graph: OperatorGraph, usual: ProgramOutcome) -> list[Budget]:
    static = graph.static_bytes
    moving = usual.peak_bytes - static
    saved = [Budget(static + _ROOM * moving, int(share * usual.saved_bytes)) for share in _SAVED]
    return saved + [Budget(static + int(share * moving), kept) for share, kept in _PEAKS]
