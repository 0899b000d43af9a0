"""Solvers of operator graphs: what runs again, and when, within budgets of bytes."""

from pipeplan.remat.graph.curve import (
    CURVE,
    auto_of_all,
    graph_budgets,
    graph_curve,
    least_peak,
)
from pipeplan.remat.graph.intervals.search import SearchLimits
from pipeplan.remat.graph.methods import METHODS
from pipeplan.remat.graph.problem import Answer, Budget, GraphProblem, Option, Pareto, front
from pipeplan.remat.graph.solve import solve

__all__ = [
    "CURVE",
    "METHODS",
    "Answer",
    "Budget",
    "GraphProblem",
    "Option",
    "Pareto",
    "SearchLimits",
    "auto_of_all",
    "front",
    "graph_budgets",
    "graph_curve",
    "least_peak",
    "solve",
]
