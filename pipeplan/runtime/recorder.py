"""What a rank did last, and how long a period took: kept small however long the run.

`Recorder` is the flight recorder: the last actions with their times, written when a rank fails.
`PeriodMeter` measures the period at the backwards of the last stage.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pipeplan.program import Action

WINDOW_PERIODS = 4
"""A best window spans this many periods: short enough to dodge one hiccup of a shared machine."""

now_ns = time.perf_counter_ns


class Recorder:
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


@dataclass(frozen=True, slots=True)
class Periods:
    """Measured periods in ns; None where a run was too short to measure."""

    best_window_ns: float | None
    """The shortest mean period over `window` periods on end."""
    median_ns: float | None
    window: int


class PeriodMeter:
    """Turns the end times of the last stage's backwards into periods of k micro-batches.

    Under flush only backwards of one step are compared: between steps the pipeline drains.
    """

    def __init__(self, k: int, microbatches: int, *, drains: bool) -> None:
        self._k = k
        self._step_size = microbatches if drains else None
        fits = (microbatches - 1) // k if drains else WINDOW_PERIODS
        self._window = min(WINDOW_PERIODS, fits)
        self._ends: deque[tuple[int, int]] = deque(maxlen=WINDOW_PERIODS * k + 1)
        self._periods: deque[int] = deque(maxlen=4096)
        self._best: float | None = None

    def mark(self, microbatch: int, end_ns: int) -> None:
        """Say that the last stage's backward of `microbatch` ended."""
        self._ends.append((microbatch, end_ns))
        period = self._since(self._k, microbatch, end_ns)
        if period is not None:
            self._periods.append(period)
        window = self._since(self._window * self._k, microbatch, end_ns)
        if window:
            mean = window / self._window
            self._best = mean if self._best is None else min(self._best, mean)

    def _since(self, back: int, microbatch: int, end_ns: int) -> int | None:
        """Time since `back` micro-batches ago, where both belong to one uninterrupted flow."""
        if back == 0 or len(self._ends) <= back:
            return None
        earlier, then_ns = self._ends[-1 - back]
        if self._step_size and earlier // self._step_size != microbatch // self._step_size:
            return None
        return end_ns - then_ns

    def result(self) -> Periods:
        """What has been measured so far."""
        median = _median(self._periods)
        return Periods(self._best, median, self._window)


def _median(values: Iterable[int]) -> float | None:
    known = list(values)
    return float(statistics.median(known)) if known else None
