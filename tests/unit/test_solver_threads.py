"""Solves in threads: Ctrl-C waits for their end, and is raised."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from pipeplan.solver_threads import SolverThread, run_threads


def test_ctrl_c_waits_until_the_solver_has_ended() -> None:
    """Nothing of it goes on behind, when Python may be gone."""
    asked, ended = threading.Event(), threading.Event()

    def solve() -> None:
        threading.Event().wait(0.1)  # the caller waits for the result by then
        os.kill(os.getpid(), signal.SIGINT)
        asked.wait()
        # Longer than one wait, as solvers take to end.
        threading.Event().wait(0.3)
        ended.set()

    one = SolverThread(solve, asked.set)
    with pytest.raises(KeyboardInterrupt):
        run_threads([one])
    assert ended.is_set()
    assert not one.running


def test_what_was_asked_to_end_does_not_begin() -> None:
    """Its result is missing, it does not run."""
    called: list[str] = []
    one = SolverThread(lambda: called.append("begun"), lambda: None)
    assert not one.running
    one.stop()
    one.start()
    one.wait(10)
    assert not one.running
    assert not called


def test_results_and_errors_are_those_of_the_solves() -> None:
    """In the order given; the first error is raised, and the others are asked to end."""
    assert run_threads([SolverThread(lambda n=n: n, lambda: None) for n in range(3)]) == [0, 1, 2]
    stop = threading.Event()

    def fails() -> int:
        raise ValueError("no model")

    waits = SolverThread(lambda: int(stop.wait()), stop.set)
    with pytest.raises(ValueError, match="no model"):
        run_threads([SolverThread(fails, lambda: None), waits])
    assert not waits.running
