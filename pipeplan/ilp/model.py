"""The periodic scheduling model at one period: build, solve, interpret."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from enum import Enum
from typing import Final

from ortools.sat.python import cp_model

from pipeplan.ilp import extract
from pipeplan.ilp.clock import Clock
from pipeplan.ilp.incumbent import Options
from pipeplan.ilp.residency import Residency
from pipeplan.ilp.schedule import Schedule
from pipeplan.ilp.times import add_times
from pipeplan.ilp.variables import Instance, Variables

WORK_PER_SECOND = 0.25
"""Deterministic work units that stand for a second of time limit: what CP-SAT did per CPU second
on models of this kind."""


DECIDERS: Final = ("no_lp", "max_lp", "default_lp", "quick_restart", "reduced_costs")
"""CP-SAT's searches for one period, the first as many as there are workers."""


class Answer(Enum):
    """What a solve proved."""

    FOUND = "found"
    IMPOSSIBLE = "impossible"
    UNKNOWN = "unknown"
    UNFIT = "unfit"
    """Schedules were found, but their exact bytes exceed a memory."""


@dataclass(frozen=True, slots=True)
class Result:
    """The answer at one period, with schedules in exact ns where one was found."""

    answer: Answer
    schedules: tuple[Schedule, ...] = ()


def solve_at(
    instance: Instance,
    period: int,
    budgets: tuple[int, ...],
    options: Options,
    seconds: float,
    lowest: int = 1,
) -> Result:
    """Whether the instance has a schedule of `period` ticks.

    Args:
        instance: What is to be scheduled.
        period: In ticks, of k micro-batches.
        budgets: Bytes of each GPU; below its memory they make room for what the model leaves out.
        options: Seed and workers.
        seconds: Time limit (work limit where deterministic).
        lowest: No schedule is made shorter than this many ns.

    Returns:
        IMPOSSIBLE is a proof for the true data if `budgets` are the GPUs' memories.
    """
    v = Variables(instance, period)
    add_times(v)
    Residency(v, budgets).add()
    solver = configured(options, seconds)
    _decide(solver, options.workers)
    status = run(solver, v.model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Result(Answer.FOUND, tuple(extract.schedules(solver, v, lowest)))
    if status == cp_model.INFEASIBLE:
        return Result(Answer.IMPOSSIBLE)
    if status == cp_model.MODEL_INVALID:
        raise AssertionError(v.model.validate())
    return Result(Answer.UNKNOWN)


def _decide(solver: Solver, workers: int) -> None:
    """Search without linear programs first: orders imply turns and counts by propagation alone.

    A worker with all of them is beside it where there are two; CP-SAT's own second worker was
    seen to hold the first one up a hundredfold on small chains.
    """
    if workers == 1:
        solver.parameters.linearization_level = 0
    else:
        solver.parameters.subsolvers.extend(DECIDERS)


class Solver(cp_model.CpSolver):
    """CP-SAT that tells the search's clock how much it worked."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock


def configured(options: Options, seconds: float) -> Solver:
    """A solver with the run's seed, workers and limits."""
    solver = Solver(options.clock)
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


def run(solver: Solver, model: cp_model.CpModel) -> int:
    """Solve; Ctrl-C stops the search at once and is raised again."""
    statuses: list[int] = []
    worker = threading.Thread(target=lambda: statuses.append(int(solver.solve(model))))
    worker.start()
    try:
        worker.join()
    except KeyboardInterrupt:
        solver.stop_search()
        worker.join()
        raise
    solver.clock.spend(solver.deterministic_time / WORK_PER_SECOND)
    return statuses[0]
