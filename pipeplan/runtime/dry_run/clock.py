"""Three notions of time for one executor: the real one, the sleeping one, the virtual one.

A training runs on the real clock. A dry run (`run`) has no layers to compute: its ops only
pass their planned time, asleep on the `SleepClock`, at once on the `VirtualClock`. A virtual clock
is a Lamport clock: it stands still unless its rank computes or a message that carries a later time
arrives, so the machine's load, its cores and its scheduler do not show in it.
"""

from __future__ import annotations

import ctypes
import sys
import time
from typing import Protocol

_PR_SET_TIMERSLACK = 29


class RankClock(Protocol):
    """The time of one rank, in ns."""

    def now(self) -> int:
        """The time."""

    def until(self, time_ns: int) -> None:
        """Return when it is at least `time_ns`."""


class SleepClock:
    """The monotonic clock of this machine, which all its processes share; waits asleep."""

    def __init__(self) -> None:
        """Asks the kernel to end this thread's sleeps in time: it may add 50 us otherwise."""
        if sys.platform == "linux":
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)

    def now(self) -> int:
        """See `RankClock`."""
        return time.monotonic_ns()

    def until(self, time_ns: int) -> None:
        """See `RankClock`."""
        while (rest := time_ns - time.monotonic_ns()) > 0:
            time.sleep(rest / 1e9)


class VirtualClock:
    """Starts at 0 and moves only when told to."""

    def __init__(self) -> None:
        self._now = 0

    def now(self) -> int:
        """See `RankClock`."""
        return self._now

    def until(self, time_ns: int) -> None:
        """See `RankClock`."""
        self._now = max(self._now, time_ns)
