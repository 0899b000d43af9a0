"""What a rank did last: the latest actions with their times, written when a rank fails."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from pipeplan.program import Action

now_ns = time.perf_counter_ns


class FlightRecorder:
    """The last `capacity` actions of a rank, with start and end in ns of one monotonic clock."""

    def __init__(self, capacity: int = 256, now: Callable[[], int] = now_ns) -> None:
        self._now = now
        self._ring: deque[tuple[Action, int, int]] = deque(maxlen=capacity)
        self.current: Action | None = None
        """The action that runs now."""
        self._since = 0

    def begin(self, action: Action) -> int:
        """Say that `action` starts; returns the time."""
        self.current = action
        self._since = self._now()
        return self._since

    def elapsed_ns(self) -> int:
        """How long the current action has been running."""
        return self._now() - self._since

    def end(self, start_ns: int) -> int:
        """Say that the current action has ended; returns the time."""
        end = self._now()
        if self.current is not None:
            self._ring.append((self.current, start_ns, end))
        return end

    def last(self) -> tuple[tuple[Action, int, int], ...]:
        """(action, start, end), oldest first."""
        return tuple(self._ring)

    def report(self) -> str:
        """One line per action, for people."""
        begin = self._ring[0][1] if self._ring else 0
        lines = [
            f"{(start - begin) / 1e6:12.3f} ms {(end - start) / 1e6:10.3f} ms  {action}"
            for action, start, end in self._ring
        ]
        return "\n".join(
            [f"{'start':>15} {'duration':>13}  action", *lines, f"now: {self.current}"]
        )
