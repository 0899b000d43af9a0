"""What the rank with the loss tells while it trains: a line per step, metrics, the period."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeplan.errors import InputError
from pipeplan.plan import Plan
from pipeplan.runtime.interfaces import Observer
from pipeplan.runtime.startup.gpu_memory import GpuMemoryUse
from pipeplan.runtime.supervision.flight_recorder import now_ns
from pipeplan.runtime.supervision.period_meter import PeriodMeter, Periods
from pipeplan.units import format_bytes, format_ns


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One line of metrics.jsonl."""

    step: int
    """Steps done, this one included."""
    loss: float
    """Mean over the step's micro-batches."""
    step_ns: int
    """Since the update before; for the first step since the start."""
    period_ns: float | None
    """Of k micro-batches: mean between the backwards of this step on the last stage."""
    units_per_s: float
    memory_bytes: int
    """Largest resident size of this process so far."""
    allocated_bytes: int | None
    reserved_bytes: int | None
    """The most so far on this rank's GPU (`GpuMemoryUse`); None on the processor."""


@dataclass(frozen=True, slots=True)
class RunFigures:
    """What one rank knows of the whole run when it ends; only the loss rank knows times."""

    periods: Periods | None
    best_step_ns: int | None
    first_loss: float | None
    last_loss: float | None


class Progress(Observer):
    """The executor's observer of one rank; silent where the loss is not."""

    def __init__(
        self,
        plan: Plan,
        *,
        total_steps: int,
        unit: str,
        units_per_microbatch: int,
        metrics: Path | None,
        as_json: bool,
        silent: bool = False,
        taken: Callable[[], GpuMemoryUse] = lambda: GpuMemoryUse(None, None),
    ) -> None:
        """Writes to `metrics` if given; prints JSON on stdout or lines for people on stderr.

        A `silent` one only measures: another replica speaks. `taken` tells of this rank's GPU.
        """
        self._taken = taken
        self._silent = silent
        self._plan = plan
        self._total = total_steps
        self._unit = unit
        self._units = units_per_microbatch * plan.microbatches
        self._metrics = metrics
        self._as_json = as_json
        self._losses: dict[int, float] = {}
        self._ends: dict[int, int] = {}
        self._meter = PeriodMeter(plan.k, plan.microbatches, drains=plan.semantics == "flush")
        self._since = now_ns()
        self._steps_seen = 0
        self._best: int | None = None
        self._first: float | None = None
        self._latest: float | None = None

    def resume_clock(self) -> None:
        """Begin timing anew, after something that is no part of training."""
        self._since = now_ns()

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
            self._report(self._measure(step))

    def measured(self) -> RunFigures:
        """The figures of the whole run."""
        periods = self._meter.result() if self._first is not None else None
        return RunFigures(periods, self._best, self._first, self._latest)

    def _measure(self, step: int) -> StepMetrics:
        now = now_ns()
        m = self._plan.microbatches
        numbers = range(step * m, (step + 1) * m)
        losses = [self._losses.pop(number) for number in numbers]
        ends = [self._ends.pop(number) for number in numbers]
        elapsed, self._since = now - self._since, now
        self._steps_seen += 1
        if self._steps_seen > 1:
            self._best = min(elapsed, self._best or elapsed)
        self._latest = sum(losses) / m
        self._first = self._latest if self._first is None else self._first
        taken = self._taken()
        return StepMetrics(
            step=step + 1,
            loss=self._latest,
            step_ns=elapsed,
            period_ns=(ends[-1] - ends[0]) / (m - 1) * self._plan.k if m > 1 else None,
            units_per_s=self._units / (elapsed / 1e9),
            memory_bytes=resident_bytes(),
            allocated_bytes=taken.allocated,
            reserved_bytes=taken.reserved,
        )

    def _report(self, metrics: StepMetrics) -> None:
        line = json.dumps({**asdict(metrics), "loss": json_number(metrics.loss)}, allow_nan=False)
        if self._metrics:
            with self._metrics.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        if self._silent:
            return
        if self._as_json:
            print(line, flush=True)
        else:
            print(self._line(metrics), file=sys.stderr, flush=True)

    def _line(self, metrics: StepMetrics) -> str:
        period = "-" if metrics.period_ns is None else format_ns(metrics.period_ns)
        return (
            f"step {metrics.step}/{self._total}  loss {metrics.loss:.4f}  period {period}"
            f"  {metrics.units_per_s:.1f} {self._unit}s/s"
            f"  memory {format_bytes(metrics.memory_bytes)}"
        )


def json_number(value: float | None) -> float | None:
    """`value` as JSON has it: None where it is not finite."""
    return value if value is not None and math.isfinite(value) else None


def drop_after(metrics: Path, steps: int) -> None:
    """Drop what an earlier run wrote after the step that is resumed from."""
    if not metrics.exists():
        return
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if line.endswith("\n") and _step(line, metrics) <= steps]
    if kept != lines:
        replace(metrics, "".join(kept))


def _step(line: str, metrics: Path) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, LookupError, TypeError):
        raise InputError(
            f"{metrics}: got {line.strip()[:40]!r}, need the lines that a run wrote, each with its"
            " step. Move the file away, and the resumed run begins one."
        ) from None


def replace(file: Path, text: str) -> None:
    """Put `text` in `file` in one step: nothing is lost where the disk is full."""
    partial = file.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)


def resident_bytes() -> int:
    """Largest resident size of this process so far."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
