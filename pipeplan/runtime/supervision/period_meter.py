"""How long a period took, from the backwards of the last stage; small however long the run."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

WINDOW_PERIODS = 4
"""A best window spans this many periods: short enough to dodge one hiccup of a shared machine."""


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
