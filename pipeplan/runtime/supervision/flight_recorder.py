"""What a rank did last, with times: written when a rank fails, and for the report of a run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from pipeplan.program import Action

now_ns = time.perf_counter_ns

_SHOWN = 256
"""So many actions are written when a rank fails."""


class Recorded(NamedTuple):
    """An action that has ended; ns of one monotonic clock of its process."""

    action: Action
    start_ns: int
    end_ns: int
    waited_ns: int
    """Of it, for messages."""


class FlightRecorder:
    """The last `capacity` actions of a rank."""

    def __init__(self, capacity: int = _SHOWN, now: Callable[[], int] = now_ns) -> None:
        self.now = now
        self._ring: deque[Recorded] = deque(maxlen=capacity)
        self.current: Action | None = None
        """The action that runs now."""
        self._since = 0

    def begin(self, action: Action) -> int:
        """Say that `action` starts; returns the time."""
        self.current = action
        self._since = self.now()
        return self._since

    def elapsed_ns(self) -> int:
        """How long the current action has been running."""
        return self.now() - self._since

    def end(self, start_ns: int, waited_ns: int = 0) -> int:
        """Say that the current action has ended, and what of it was waiting; returns the time."""
        end = self.now()
        if self.current is not None:
            self._ring.append(Recorded(self.current, start_ns, end, waited_ns))
        return end

    def last(self) -> tuple[Recorded, ...]:
        """Oldest first."""
        return tuple(self._ring)

    def report(self) -> str:
        """One line per action, for people."""
        shown = self.last()[-_SHOWN:]
        begin = shown[0].start_ns if shown else 0
        lines = [
            f"{(start - begin) / 1e6:12.3f} ms {(end - start) / 1e6:10.3f} ms  {action}"
            for action, start, end, _ in shown
        ]
        return "\n".join(
            [f"{'start':>15} {'duration':>13}  action", *lines, f"now: {self.current}"]
        )
