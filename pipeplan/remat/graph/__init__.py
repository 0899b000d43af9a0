"""Solvers of operator graphs: what runs again, and when, within budgets of bytes."""

from pipeplan.remat.graph.intervals.search import Limits
from pipeplan.remat.graph.methods import METHODS
from pipeplan.remat.graph.problem import Answer, Budget, GraphProblem, Option, Pareto
from pipeplan.remat.graph.solve import solve

__all__ = [
    "METHODS",
    "Answer",
    "Budget",
    "GraphProblem",
    "Limits",
    "Option",
    "Pareto",
    "solve",
]
