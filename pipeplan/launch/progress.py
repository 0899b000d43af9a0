"""What the rank with the losses measures while it trains, and tells those who follow it."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass

from pipeplan.callbacks import Callback, StepMetrics
from pipeplan.plan import Plan
from pipeplan.runtime.interfaces import Observer
from pipeplan.runtime.startup.gpu_memory import GpuMemoryUse
from pipeplan.runtime.supervision.flight_recorder import now_ns
from pipeplan.runtime.supervision.period_meter import PeriodMeter, Periods


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What one rank knows of the whole run when it ends; only the loss rank knows times."""

    periods: Periods | None
    best_step_ns: int | None
    first_loss: float | None
    last_loss: float | None


class Progress(Observer):
    """The executor's observer of one rank; tells nobody where the losses are not known."""

    def __init__(
        self,
        plan: Plan,
        *,
        units_per_microbatch: int,
        waits: bool = False,
        follower: Callback | None = None,
        taken: Callable[[], GpuMemoryUse] = lambda: GpuMemoryUse(None, None),
    ) -> None:
        """Measures nothing yet.

        Args:
            plan: of the run.
            units_per_microbatch: what throughput counts, of all replicas.
            waits: whether updates wait for all stages; under 2bw in a later step.
            follower: hears of every step; None where another rank tells.
            taken: tells of this rank's GPU.
        """
        self._taken = taken
        self._follower = follower
        self._plan = plan
        self._units = units_per_microbatch * plan.microbatches
        self._losses: dict[int, float] = {}
        self._ends: dict[int, int] = {}
        self._meter = PeriodMeter(plan.k, plan.microbatches, drains=plan.semantics == "flush")
        self._since = now_ns()
        self._late = waits and plan.semantics == "2bw"
        self._steps_seen = 0
        """Steps since the start; where updates are late, since the last pause, too. The first of
        them warms up, or has no update of a step before."""
        self._best: int | None = None
        self._first: float | None = None
        self._latest: float | None = None
        self._untold: dict[int, _LastStage] = {}
        """Steps of which not all stages are known to have updated."""

    def resume_clock(self) -> None:
        """Begin timing anew, after something that is no part of training."""
        self._since = now_ns()
        if self._late:
            self._steps_seen = 0

    def loss(self, microbatch: int, value: float) -> None:
        """See `Observer`."""
        self._losses[microbatch] = value

    def backward(self, microbatch: int, end_ns: int) -> None:
        """See `Observer`."""
        self._meter.mark(microbatch, end_ns)
        self._ends[microbatch] = end_ns

    def updated(self, stage: int, step: int) -> None:
        """See `Observer`."""
        if stage == len(self._plan.stages) - 1:
            measured = self._measure(step)
            if self._follower:
                self._untold[step] = measured

    def stepped(self, step: int, norm: float, rates: tuple[float, ...]) -> None:
        """See `Observer`."""
        known = self._untold.pop(step)
        taken = self._taken()
        metrics = StepMetrics(
            step=step + 1,
            loss=known.loss,
            gradient_norm=norm,
            learning_rates=rates,
            step_ns=known.step_ns,
            period_ns=known.period_ns,
            units_per_s=self._units / (known.step_ns / 1e9),
            memory_bytes=resident_bytes(),
            allocated_bytes=taken.allocated,
            reserved_bytes=taken.reserved,
        )
        if self._follower:
            self._follower.step(metrics)

    def measured(self) -> RunFigures:
        """The figures of the whole run."""
        periods = self._meter.result() if self._first is not None else None
        return RunFigures(periods, self._best, self._first, self._latest)

    def _measure(self, step: int) -> _LastStage:
        m = self._plan.microbatches
        numbers = range(step * m, (step + 1) * m)
        losses = [self._losses.pop(number) for number in numbers]
        ends = [self._ends.pop(number) for number in numbers]
        end = ends[-1] if self._late else now_ns()
        elapsed, self._since = end - self._since, end
        self._steps_seen += 1
        if self._steps_seen > (2 if self._late else 1):
            self._best = min(elapsed, self._best or elapsed)
        self._latest = sum(losses) / m
        self._first = self._latest if self._first is None else self._first
        period = (ends[-1] - ends[0]) / (m - 1) * self._plan.k if m > 1 else None
        return _LastStage(self._latest, elapsed, period)


@dataclass(frozen=True, slots=True)
class _LastStage:
    """What is known of a step when the last stage has updated; as in `StepMetrics`."""

    loss: float
    step_ns: int
    period_ns: float | None


def resident_bytes() -> int:
    """Largest resident size of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
