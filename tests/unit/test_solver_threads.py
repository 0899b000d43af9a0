"""Solves in threads: Ctrl-C waits for their end, and is raised."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from pipeplan.solver_threads import SolverThread, run_threads

INTERRUPTED = """
import os, signal, threading
from pipeplan.solver_threads import SolverThread, run_threads

signal.signal(signal.SIGINT, signal.default_int_handler)  # who began this may ignore it
asked = threading.Event()

def solve():
    threading.Event().wait(0.1)  # the caller waits for the result by then
    os.kill(os.getpid(), signal.SIGINT)
    asked.wait()
    threading.Event().wait(0.3)  # longer than one wait, as solvers take to end
    print("ended", flush=True)

one = SolverThread(solve, asked.set)
try:
    run_threads([one])
except KeyboardInterrupt:
    print("interrupted", one.running)
"""


def test_ctrl_c_waits_until_the_solver_has_ended() -> None:
    """Nothing of it goes on behind, when Python may be gone; in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["ended", "interrupted", "False"]


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
