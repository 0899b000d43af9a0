"""Solves in threads of their own, so that Ctrl-C ends them at once and is raised again.

A solver of OR-tools holds its caller until it ends, or takes Ctrl-C for itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

_Result = TypeVar("_Result")

STOP_S: Final = 0.1
"""Time between two requests to stop, in seconds."""


class SolverThread(Generic[_Result]):
    """One solve in a thread of its own."""

    def __init__(self, solve: Callable[[], _Result], stop: Callable[[], object]) -> None:
        """Not begun yet.

        Args:
            solve: returns what the solver says.
            stop: ends it if its search has begun, and does nothing else.
        """
        self._call, self._stop = solve, stop
        self._result: list[_Result] = []
        self._error: BaseException | None = None
        self._stopped, self._ended = threading.Event(), threading.Event()
        # Threads do not say it themselves: Ctrl-C in `Thread.join` marks one as ended (3.11).
        self._thread = threading.Thread(target=self._solve)

    def start(self) -> None:
        """Begin to solve."""
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether it has begun and not ended."""
        return self._thread.ident is not None and not self._ended.is_set()

    def wait(self, seconds: float) -> None:
        """Wait for its end, but not longer."""
        if self._ended.wait(seconds):
            self._thread.join()

    def join(self) -> _Result:
        """Wait for its end; what it raised is raised here."""
        self._ended.wait()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._result[0]

    def stop(self) -> None:
        """Ask it to end if its search has begun, and not to begin if its thread has not."""
        self._stopped.set()
        self._stop()

    def _solve(self) -> None:
        try:
            if not self._stopped.is_set():
                self._result.append(self._call())
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()


def run_threads(solves: Sequence[SolverThread[_Result]]) -> list[_Result]:
    """What each says, solved side by side; Ctrl-C stops all at once and is raised again."""
    try:
        for each in solves:
            each.start()
        return [each.join() for each in solves]
    except BaseException:
        for each in solves:
            each.stop()
        while running := [each for each in solves if each.running]:
            for each in running:
                each.stop()  # again: a solver that has not begun does not hear it
            running[0].wait(STOP_S)
        for each in solves:
            each.wait(0)
        raise
