"""The literal ILP of Beaumont, Eyraud-Dubois and Shilova (2020) as a planning method.

A reference for small chains: 1F1B, equal GPUs, one half-duplex link per pair of GPUs, the paper's
memory count. Solved through OR-tools MathOpt; docs/reference/paper-ilp.md has the equations.
"""

from __future__ import annotations

import datetime
import math
import time
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from ortools.math_opt.python import mathopt
from ortools.util.python.solve_interrupter import SolveInterrupter

from pipeplan.errors import InputError, InternalError
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.cpsat.solve import WORK_PER_SECOND
from pipeplan.ilp.memory import fits, memory_rows
from pipeplan.ilp.paper import memory, scheduling
from pipeplan.ilp.paper.decision import PaperDecision, read
from pipeplan.ilp.paper.instance import PaperInstance, from_costs
from pipeplan.ilp.paper.stages import merged
from pipeplan.ilp.paper.start import start_values
from pipeplan.ilp.paper.times import shortest
from pipeplan.ilp.paper.variables import Term, create
from pipeplan.ilp.schedule import Schedule
from pipeplan.units import ceil_div

_Reason = mathopt.TerminationReason

Backend = Literal["cp-sat", "highs", "scip"]

_BACKENDS = {
    "cp-sat": mathopt.SolverType.CP_SAT,
    "highs": mathopt.SolverType.HIGHS,
    "scip": mathopt.SolverType.GSCIP,
}
_TIME_SCALE = 1000.0
_BYTE_SCALE = 10_000.0
"""Floating-point solvers see the horizon as at most 1000 and the memory as at most 10000: their
absolute tolerances (1e-6) are then far below anything a plan could gain from breaking them."""
_LARGEST = 1e17
"""CP-SAT's own limit of what it takes for a bound; its default would cut variables at 1e7."""
_TOLERANCE = 1e-6
"""A floating-point bound is lowered by this share of the horizon before it is called proven."""


@dataclass(frozen=True, slots=True)
class PaperResult:
    """What the ILP found; the bound holds for k = 1 under the paper's memory count.

    Attributes:
        status: `optimal`: the period equals the bound; `feasible`: it does not (yet);
            `infeasible`: proven, no k changes that; `unknown`: no schedule before the limit.
        schedule: The best schedule, with exact integer times; None without one.
        bound: Proven lower bound on the period in ns, an integer as periods are; None where
            infeasible.
        seconds: Time spent.
    """

    status: Literal["optimal", "feasible", "infeasible", "unknown"]
    schedule: Schedule | None
    bound: Fraction | None
    seconds: float


def solve(
    costs: CostModel,
    *,
    time_limit: float,
    backend: Backend = "cp-sat",
    in_flight_limit: int | None = None,
    count_slots: bool = True,
    start: Schedule | None = None,
    workers: int = 1,
    seed: int = 0,
    deterministic: bool = False,
    interrupter: SolveInterrupter | None = None,
) -> PaperResult:
    """Minimize the period by the paper's ILP (1)-(36).

    Args:
        costs: Chain and cluster; memory model "paper".
        time_limit: Seconds, the writing of the model included.
        backend: CP-SAT works on integers and proves exactly; HiGHS and SCIP work on floats.
        in_flight_limit: Most micro-batches a layer may hold (R6): microbatches + 1 under 2bw.
        count_slots: Count second message slots (P5). False gives the paper's one slot per
            buffer: a lower bound on every variant, whose schedules may not fit (P5).
        start: A schedule with k = 1 that fits: the solver starts from its values of all variables.
        workers: Threads, where the backend has any.
        seed: Of the backend.
        deterministic: CP-SAT's limit counts work instead of time, so that its answer repeats.
        interrupter: Stops the solve from another thread; the best so far is returned.

    Raises:
        InputError: if the chain or cluster is outside the paper's setting, or no such backend.
    """
    began = time.monotonic()
    if backend not in _BACKENDS:
        raise InputError(
            f"method paper-ilp, backend: got {backend!r}, need one of {', '.join(_BACKENDS)}"
        )
    exact = from_costs(costs, in_flight_limit)
    integer = backend == "cp-sat"
    unit, numbers = _in_units(exact, integer=integer)
    model = mathopt.Model()
    x = create(model, numbers, integer=integer, count_slots=count_slots)
    scheduling.add(model, numbers, x)
    memory.add(model, numbers, x)
    model.minimize(x.period)
    left = time_limit - (0 if deterministic else time.monotonic() - began)
    parameters = _parameters(left, backend, workers, seed, deterministic)
    useful = start is not None and start.period <= exact.horizon
    hints = [start_values(exact, x, start, unit)] if start is not None and useful else []
    answer = _run(model, backend, parameters, hints, interrupter)
    reason = answer.termination.reason
    if reason in (_Reason.INFEASIBLE, _Reason.INFEASIBLE_OR_UNBOUNDED):
        return PaperResult("infeasible", None, None, time.monotonic() - began)
    bound = _bound(exact, answer.best_objective_bound() * unit, integer=integer)
    schedule = None
    if answer.has_primal_feasible_solution():
        schedule = _schedule(costs, exact, read(numbers, x, answer.variable_values()))
    return PaperResult(
        _status(schedule, bound), schedule, Fraction(bound), time.monotonic() - began
    )


def _run(
    model: mathopt.Model,
    backend: Backend,
    parameters: mathopt.SolveParameters,
    hints: list[dict[Term, float]],
    interrupter: SolveInterrupter | None,
) -> mathopt.SolveResult:
    known = mathopt.ModelSolveParameters(
        solution_hints=[mathopt.SolutionHint(variable_values=values) for values in hints]
    )
    try:
        return mathopt.solve(
            model,
            _BACKENDS[backend],
            params=parameters,
            model_params=known,
            interrupter=interrupter,
        )
    except Exception as error:  # MathOpt promises no type, and fails while it builds one
        reason = error.__context__ or error
        raise InternalError(
            f"method paper-ilp, backend {backend}: got {reason}, need an answer of the solver."
            " Use another backend."
        ) from error


def _in_units(exact: PaperInstance[int], *, integer: bool) -> tuple[float, PaperInstance[float]]:
    """(ns per unit of time of the model, the instance in the model's units)."""
    if integer:
        return 1.0, exact
    unit = max(1.0, exact.horizon / _TIME_SCALE)
    return unit, exact.scaled(unit, max(1.0, exact.memory / _BYTE_SCALE))


def _parameters(
    seconds: float, backend: Backend, workers: int, seed: int, deterministic: bool
) -> mathopt.SolveParameters:
    parameters = mathopt.SolveParameters(random_seed=seed, relative_gap_tolerance=0.0)
    if deterministic and backend == "cp-sat":
        parameters.cp_sat.interleave_search = True
        parameters.cp_sat.max_deterministic_time = max(1e-3, seconds * WORK_PER_SECOND)
    else:
        parameters.time_limit = datetime.timedelta(seconds=max(0.0, seconds))
    if backend == "cp-sat":
        parameters.threads = workers
        parameters.cp_sat.mip_max_bound = _LARGEST
    return parameters


def _least(exact: PaperInstance[int]) -> int:
    """The average load of the GPUs and the longest layer, in ns."""
    loads = [exact.load(layer) for layer in range(1, exact.layers + 1)]
    return max(ceil_div(sum(loads), exact.gpus), *loads)


def _bound(exact: PaperInstance[int], claimed: float, *, integer: bool) -> int:
    """A solver's bound in ns as the integer it proves for integer periods."""
    if not math.isfinite(claimed):
        return _least(exact)
    doubt = 0.5 if integer else _TOLERANCE * max(exact.horizon, 1)
    return max(_least(exact), math.ceil(claimed - doubt))


def _status(schedule: Schedule | None, bound: int) -> Literal["optimal", "feasible", "unknown"]:
    if schedule is None:
        return "unknown"
    if schedule.period < bound:
        raise InternalError(
            f"method paper-ilp: got a schedule of {schedule.period} ns, below the solver's bound"
            f" of {bound} ns. Report this chain, and use --method auto."
        )
    return "optimal" if schedule.period == bound else "feasible"


def _schedule(
    costs: CostModel, exact: PaperInstance[int], decision: PaperDecision
) -> Schedule | None:
    """The decision at its shortest period; None if it breaks memory by a rounding error."""
    found = shortest(exact, decision, _least(exact))
    if found is None:
        return None
    period, times = found
    schedule = merged(exact, decision, period, times)
    return schedule if fits(memory_rows(costs, schedule)) else None
