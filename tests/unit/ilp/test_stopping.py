"""Solves side by side: Ctrl-C ends them whenever it comes, and what one raises is heard."""

from __future__ import annotations

import threading
import time
from unittest import mock

import pytest
from ortools.sat.python import cp_model

from pipeplan.ilp.cpsat.solve import CpSolver, configured, run_all
from pipeplan.solver_threads import SolverThread
from tests.searches import limits

HOLES = 24
LIMIT_S = 3600.0
"""Of a solve, and longer than that of a test: one that is not stopped fails it."""


def hard() -> tuple[CpSolver, cp_model.CpModel]:
    """Pigeons that no search without symmetries places while a test may take."""
    model = cp_model.CpModel()
    on = [[model.new_bool_var("") for _ in range(HOLES)] for _ in range(HOLES + 1)]
    for row in on:
        model.add_bool_or(row)
    for hole in zip(*on, strict=True):
        for n, one in enumerate(hole):
            for other in hole[:n]:
                model.add_bool_or([one.negated(), other.negated()])
    solver = configured(limits(), LIMIT_S)
    solver.parameters.symmetry_level = 0
    solver.parameters.cp_model_presolve = False
    return solver, model


def test_while_threads_start() -> None:
    """Interrupted before the second thread, the first solver is stopped at once."""
    start = threading.Thread.start
    threads: list[threading.Thread] = []

    def started(thread: threading.Thread) -> None:
        if threads:
            raise KeyboardInterrupt
        threads.append(thread)
        start(thread)

    with mock.patch.object(threading.Thread, "start", started), pytest.raises(KeyboardInterrupt):
        run_all([hard(), hard()])
    assert not threads[0].is_alive()


def test_before_the_search_begins() -> None:
    """A solver that has not begun when it is stopped first is stopped as soon as it begins."""
    solve = CpSolver.solve
    others = threading.active_count()

    def late(solver: CpSolver, model: cp_model.CpModel) -> object:
        time.sleep(0.3)
        return solve(solver, model)

    with (
        mock.patch.object(CpSolver, "solve", late),
        mock.patch.object(SolverThread, "join", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        run_all([hard()])
    assert threading.active_count() == others


def test_what_a_solve_raises() -> None:
    """An exception in a solver's thread comes out, and the other solver is stopped."""
    others, (broken, model) = threading.active_count(), hard()
    with (
        mock.patch.object(broken, "solve", side_effect=MemoryError("no room")),
        pytest.raises(MemoryError, match="no room"),
    ):
        run_all([(broken, model), hard()])
    assert threading.active_count() == others
