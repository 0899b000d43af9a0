"""Who follows a run: its log on stderr or stdout, and the files that grow while it trains."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeplan.callbacks import (
    Callback,
    RunEnd,
    RunStart,
    SavedCheckpoint,
    StepMetrics,
    ValidationResult,
)
from pipeplan.errors import InputError
from pipeplan.units import format_bytes, format_ns
from pipeplan.validation import LOSS
from pipeplan.whole_file import replace


class TextLog(Callback):
    """Lines for people, on stderr."""

    def __init__(self, total_steps: int, unit: str) -> None:
        """Takes how many steps there will be, and what throughput counts."""
        self._total, self._unit = total_steps, unit

    def step(self, step: StepMetrics) -> None:
        """One line per step."""
        period = "-" if step.period_ns is None else format_ns(step.period_ns)
        rates = [f"{rate:.4g}" for rate in step.learning_rates]
        print(
            f"step {step.step}/{self._total}  loss {step.loss:.4f}"
            f"  norm {step.gradient_norm:.4g}"
            f"  lr {'..'.join(dict.fromkeys((rates[0], rates[-1]))) if rates else '-'}"
            f"  period {period}  {step.units_per_s:.1f} {self._unit}s/s"
            f"  {_memory(step)}",
            file=sys.stderr,
            flush=True,
        )

    def validation(self, result: ValidationResult) -> None:
        """One line per validation."""
        values = {LOSS: result.loss, **result.metrics}
        told = "  ".join(f"{name} {value:.4f}" for name, value in values.items())
        best = "  (best so far)" if result.best else ""
        print(f"validated step {result.step}  {told}{best}", file=sys.stderr, flush=True)


def _memory(step: StepMetrics) -> str:
    """Of the GPU, where one computes; else of the process."""
    if step.allocated_bytes is None:
        return f"resident {format_bytes(step.memory_bytes)}"
    return f"GPU memory {format_bytes(step.allocated_bytes)}"


class JsonLog(Callback):
    """One JSON object a line, on stdout (docs/reference/formats.md, "The log of a run")."""

    def __init__(self, *, steps_alone: bool = False) -> None:
        """`steps_alone`: nothing but steps, as metrics.jsonl has them."""
        self._all = not steps_alone

    def start(self, run: RunStart) -> None:
        """See `Callback`, as all others."""
        self._print("start", run)

    def step(self, step: StepMetrics) -> None:
        """See `start`."""
        if self._all:
            self._print("step", step)
        else:
            print(json_line(asdict(step)), flush=True)

    def validation(self, result: ValidationResult) -> None:
        """See `start`."""
        self._print("validation", result)

    def checkpoint(self, saved: SavedCheckpoint) -> None:
        """See `start`."""
        self._print("checkpoint", saved)

    def end(self, end: RunEnd) -> None:
        """See `start`."""
        self._print("end", end)

    def _print(self, event: str, told: Any) -> None:
        if self._all:
            print(json_line({"event": event, **asdict(told)}), flush=True)


class MetricsFile(Callback):
    """metrics.jsonl, a line per step."""

    def __init__(self, file: Path) -> None:
        """Adds to `file`."""
        self._file = file

    def step(self, step: StepMetrics) -> None:
        """See `Callback`."""
        _append(self._file, asdict(step))


class ValidationFile(Callback):
    """validation.jsonl, a line per validation."""

    def __init__(self, file: Path) -> None:
        """Adds to `file`."""
        self._file = file

    def validation(self, result: ValidationResult) -> None:
        """See `Callback`."""
        _append(self._file, asdict(result))


def _append(file: Path, content: Mapping[str, Any]) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json_line(content) + "\n")


def json_line(content: Mapping[str, Any]) -> str:
    """`content` as JSON, with null for numbers that are not finite."""
    return json.dumps(_finite(content), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, tuple | list):
        return [_finite(each) for each in value]
    return json_number(value) if isinstance(value, float) else value


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
