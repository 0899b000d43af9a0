"""Linear models with binary variables, and what their solvers answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

from pipeplan.errors import InputError

SOLVERS = ("highs", "scip")


@dataclass(frozen=True)
class Solved:
    """What a solver says.

    Attributes:
        objective: of the best solution; None where none was found.
        bound: below which no solution is.
        proven: whether the solution is best, or there is none.
        runs: computations in the order of the solution.
    """

    objective: int | None
    bound: float
    proven: bool
    runs: tuple[int, ...] = ()


@dataclass(frozen=True)
class Constraint:
    """A linear constraint: low <= expression <= high."""

    expression: Any
    low: float
    high: float


Constraints = Iterator[Constraint]


def at_most(one: Any, other: Any) -> Constraint:
    """The first is at most the second."""
    return Constraint(one - other, -inf, 0)


def equal(one: Any, other: Any) -> Constraint:
    """Both are equal."""
    return Constraint(one - other, 0, 0)


def add(model: Any, constraint: Constraint) -> None:
    """Adds a constraint; one without variables that holds is none.

    Raises:
        ValueError: if one without variables does not hold.
    """
    if isinstance(constraint.expression, (int, float)):
        if not constraint.low <= constraint.expression <= constraint.high:
            raise ValueError(f"a constraint without variables: got {constraint}")
        return
    model.add_linear_constraint(constraint.expression, constraint.low, constraint.high)


def new_model() -> Any:
    """An empty model of OR-tools' model builder."""
    from ortools.linear_solver.python import model_builder

    make: Any = model_builder.Model
    return make()


def run(model: Any, solver: str, seconds: float) -> tuple[Any, bool, bool]:
    """The solver behind a search, whether it has a solution, and whether it proved its answer.

    Raises:
        InputError: if OR-tools was built without that solver.
    """
    from ortools.linear_solver.python import model_builder

    found = model_builder.Solver(solver)
    if not found.solver_is_supported():
        raise InputError(f"solver: got {solver!r}, need one of {', '.join(SOLVERS)}")
    found.set_time_limit_in_seconds(seconds)
    if solver == "highs":
        found.set_solver_specific_parameters("output_flag=false\nthreads=1")
    status = found.solve(model)
    optimal = status == model_builder.SolveStatus.OPTIMAL
    feasible = optimal or status == model_builder.SolveStatus.FEASIBLE
    return found, feasible, optimal or status == model_builder.SolveStatus.INFEASIBLE
