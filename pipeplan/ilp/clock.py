"""What a search's time limit counts: seconds, or work that is the same on every machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from pipeplan.ilp.compiled import compile_s

LOOK_S = 0.01
"""Work between two looks at the clock, in seconds, where the solver did none: every loop that a
limit may end looks once a turn."""


class OutOfTimeError(Exception):
    """A computation that has no answer before its end was given up."""


def never() -> bool:
    """No limit."""
    return False


@dataclass
class SearchClock:
    """Seconds of the wall since it was made; what numba compiles meanwhile is not counted."""

    started: float = field(default_factory=time.monotonic)
    compiled_s: float = field(default_factory=compile_s)
    """That were spent on compiling before."""

    @property
    def wall_s(self) -> float:
        """Seconds of the wall, for people."""
        return time.monotonic() - self.started

    @property
    def spent(self) -> float:
        """Seconds that counted against the limit so far; asking costs nothing."""
        return self.wall_s - (compile_s() - self.compiled_s)

    def elapsed(self) -> float:
        """Seconds that count against the limit."""
        return self.spent

    def charge(self, work: float) -> None:
        """The solver did `work` units; the wall has seen them."""

    def limit(self, seconds: float, work: float) -> Callable[[], bool]:
        """Tells whether so many seconds have passed; each look is for `work` units to come."""
        end = self.spent + seconds

        def over() -> bool:
            self.charge(work)
            return self.spent >= end

        return over


@dataclass
class DeterministicClock(SearchClock):
    """Work instead of time: a second for each unit of the solver's, a little for each look.

    The same search then ends at the same point whatever else the machine does.
    """

    worked: float = 0.0

    @property
    def spent(self) -> float:
        """Seconds' worth of work done."""
        return self.worked

    def elapsed(self) -> float:
        """Seconds' worth of work done."""
        self.worked += LOOK_S
        return self.worked

    def charge(self, work: float) -> None:
        """Count the solver's work."""
        self.worked += work
