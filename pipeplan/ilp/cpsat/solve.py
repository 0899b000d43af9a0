"""The periodic scheduling model at one period: build, solve, interpret."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Final

from ortools.sat.python import cp_model

from pipeplan.ilp.clock import SearchClock
from pipeplan.ilp.cpsat import extract
from pipeplan.ilp.cpsat.memory import MemoryConstraints
from pipeplan.ilp.cpsat.model import add_times
from pipeplan.ilp.cpsat.variables import Instance, Variables
from pipeplan.ilp.incumbent import SearchOptions
from pipeplan.ilp.schedule import Schedule
from pipeplan.solver_threads import SolverThread, run_threads

WORK_PER_SECOND = 0.25
"""Deterministic work units that stand for a second of time limit: what CP-SAT did per CPU second
on models of this kind."""


SUBSOLVERS: Final = ("no_lp", "max_lp", "default_lp", "quick_restart", "reduced_costs")
"""CP-SAT's searches for one period, the first as many as there are workers."""


SEARCH_SUBSOLVERS: Final = (
    (1, cp_model.AUTOMATIC_SEARCH),
    (0, cp_model.PORTFOLIO_WITH_QUICK_RESTART_SEARCH),
    (0, cp_model.AUTOMATIC_SEARCH),
    (2, cp_model.AUTOMATIC_SEARCH),
)
"""How much of a small model is also a linear program, and how it branches, attempt by attempt."""


class Status(Enum):
    """What a solve proved."""

    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"
    MEMORY_OVERFLOW = "memory overflow"
    """Schedules were found, but their exact bytes exceed a memory."""


@dataclass(frozen=True, slots=True)
class PeriodResult:
    """The answer at one period, with schedules in exact ns where one was found."""

    status: Status
    schedules: tuple[Schedule, ...] = ()


def solve_at(
    instance: Instance,
    period: int,
    budgets: tuple[int, ...],
    options: SearchOptions,
    seconds: float,
    lowest: int = 1,
) -> PeriodResult:
    """Whether the instance has a schedule of `period` ticks.

    Args:
        instance: What is to be scheduled.
        period: In ticks, of k micro-batches.
        budgets: Bytes of each GPU; below its memory they make room for what the model leaves out.
        options: Seed and workers.
        seconds: Time limit (work limit where deterministic).
        lowest: No schedule is made shorter than this many ns.

    Returns:
        INFEASIBLE is a proof for the true data if `budgets` are the GPUs' memories.
    """
    v = _variables(instance, period, budgets)
    solver = configured(options, seconds)
    _decide(solver, options.workers)
    return _result(run(solver, v.model), solver, v, lowest)


def solve_each(
    asked: Sequence[tuple[Instance, int]],
    options: SearchOptions,
    seconds: float,
    lowest: int = 1,
    attempt: int = 0,
) -> list[PeriodResult]:
    """`solve_at` of several small models side by side, one worker each.

    What one search does not decide in many times as long another often does at once, so each
    `attempt` chooses another search: use of linear programs and seed change.

    Args:
        asked: Instances and periods in ticks, as many as there are workers.
        options: Seed.
        seconds: Time limit of each.
        lowest: No schedule is made shorter than this many ns.
        attempt: How often the same was asked before.
    """
    alone = replace(options, workers=1, seed=(options.seed + attempt) % 2**31)
    models = [_variables(instance, period, instance.costs.budgets) for instance, period in asked]
    solvers = [configured(alone, seconds) for _ in models]
    for solver in solvers:
        level, branching = SEARCH_SUBSOLVERS[attempt % len(SEARCH_SUBSOLVERS)]
        solver.parameters.linearization_level = level
        solver.parameters.search_branching = branching
    statuses = run_all([(solver, v.model) for solver, v in zip(solvers, models, strict=True)])
    return [
        _result(status, solver, v, lowest)
        for status, solver, v in zip(statuses, solvers, models, strict=True)
    ]


def _variables(instance: Instance, period: int, budgets: tuple[int, ...]) -> Variables:
    v = Variables(instance, period)
    add_times(v)
    MemoryConstraints(v, budgets).add()
    return v


def _result(status: int, solver: CpSolver, v: Variables, lowest: int) -> PeriodResult:
    """What a status means, with schedules where there is a solution."""
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return PeriodResult(Status.FEASIBLE, tuple(extract.schedules(solver, v, lowest)))
    if status == cp_model.INFEASIBLE:
        return PeriodResult(Status.INFEASIBLE)
    if status == cp_model.MODEL_INVALID:
        raise AssertionError(v.model.validate())
    return PeriodResult(Status.UNKNOWN)


def _decide(solver: CpSolver, workers: int) -> None:
    """Search without linear programs first: orders imply shifts and counts by propagation alone.

    A worker with all of them is beside it where there are two; CP-SAT's own second worker was
    seen to hold the first one up a hundredfold on small chains.
    """
    if workers == 1:
        solver.parameters.linearization_level = 0
    else:
        solver.parameters.subsolvers.extend(SUBSOLVERS)


class CpSolver(cp_model.CpSolver):
    """CP-SAT that tells the search's clock how much it worked."""

    def __init__(self, clock: SearchClock) -> None:
        super().__init__()
        self.clock = clock


def configured(options: SearchOptions, seconds: float) -> CpSolver:
    """A solver with the run's seed, workers and limits."""
    solver = CpSolver(options.clock)
    parameters = solver.parameters
    parameters.num_workers = options.workers
    parameters.random_seed = options.seed
    parameters.catch_sigint_signal = False
    if options.deterministic:
        parameters.interleave_search = True
        parameters.max_deterministic_time = max(1e-3, seconds * WORK_PER_SECOND)
    else:
        parameters.max_time_in_seconds = max(1e-3, seconds)
    return solver


def run(solver: CpSolver, model: cp_model.CpModel) -> int:
    """Solve; Ctrl-C stops the search at once and is raised again."""
    return run_all([(solver, model)])[0]


def run_all(pairs: Sequence[tuple[CpSolver, cp_model.CpModel]]) -> list[int]:
    """Solve models side by side; Ctrl-C stops all at once and is raised again."""
    found = run_threads(
        [SolverThread(partial(solver.solve, model), solver.stop_search) for solver, model in pairs]
    )
    for solver, _ in pairs:
        solver.clock.charge(solver.deterministic_time / WORK_PER_SECOND)
    return [int(status) for status in found]
