"""The solver: `solve` takes a problem and limits and returns the best schedule found, with bounds.

This is its only door: nothing outside imports a module of this package.
"""

from pipeplan.ilp.incumbent import Report
from pipeplan.ilp.problem import Limits, Method, Problem
from pipeplan.ilp.solution import Solution
from pipeplan.ilp.solve import solve

__all__ = ["Limits", "Method", "Problem", "Report", "Solution", "solve"]
