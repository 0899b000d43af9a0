"""What the folder of a run holds, as far as a page shows it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pipeplan.action_times import FILE as TIMES
from pipeplan.action_times import ActionTimes
from pipeplan.document import read_text
from pipeplan.errors import InputError
from pipeplan.memory_terms import MemoryReport
from pipeplan.plan import Plan
from pipeplan.report.memory import has_memory_alone, read_memory
from pipeplan.report.page.run_sections import TrainedStep, ValidatedStep
from pipeplan.report.run import PLAN, TrainingRun, read

_Line = TypeVar("_Line")
METRICS = "metrics.jsonl"
VALIDATIONS = "validation.jsonl"
MOST_STEPS = 1000
"""Of a longer run every n-th step is shown."""


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The files of a run; None where there is none: runs of older versions have fewer."""

    folder: str
    run: TrainingRun | None
    plan: Plan | None
    times: ActionTimes | None
    memory: MemoryReport | None
    steps: tuple[TrainedStep, ...]
    validations: tuple[ValidatedStep, ...]


def read_files(folder: str) -> RunFiles:
    """All of them.

    Raises:
        InputError: if there is no run, or a file is none that a run of its plan wrote.
    """
    place = Path(folder)
    run = None if has_memory_alone(folder) else read(folder)
    plan, times = read_timed(place)
    memory = read_memory(folder)
    _check_plan(plan, memory, place / "memory.json")
    steps = tuple(_told(place / METRICS, _trained))
    validations = tuple(_told(place / VALIDATIONS, _validated))
    return RunFiles(folder, run, plan, times, memory, steps, validations)


def read_timed(folder: Path) -> tuple[Plan | None, ActionTimes | None]:
    """What was run and when its actions happened.

    Raises:
        InputError: if a file is none that a run of its plan wrote.
    """
    file = folder / TIMES
    plan = Plan.read(folder / PLAN) if (folder / PLAN).is_file() else None
    times = ActionTimes.read(file) if file.is_file() else None
    _check_plan(plan, times, file)
    return plan, times


def _check_plan(plan: Plan | None, told: ActionTimes | MemoryReport | None, file: Path) -> None:
    if plan and told and told.plan_digest != plan.digest():
        raise InputError(
            f"{file}: got the file of another plan than {file.with_name(PLAN)}, need those of one"
            " run."
        )


def _told(file: Path, read_line: Callable[[dict[str, Any]], _Line]) -> Iterator[_Line]:
    """Lines of a run, or every n-th of a long one."""
    if not file.is_file():
        return
    lines = [line for line in read_text(file).splitlines() if line]
    every = max(1, -(-len(lines) // MOST_STEPS))
    for line in lines[every - 1 :: every]:
        try:
            yield read_line(json.loads(line))
        except (ValueError, OverflowError, LookupError, TypeError, AttributeError):
            raise InputError(
                f"{file}: got {line.strip()[:40]!r}, need the lines that a run wrote. Move the"
                " file away."
            ) from None


def _trained(told: dict[str, Any]) -> TrainedStep:
    return TrainedStep(
        int(told["step"]),
        _finite(told["loss"]),
        int(told["step_ns"]),
        _finite(told["units_per_s"]),
        _finite(told.get("gradient_norm")),
    )


def _validated(told: dict[str, Any]) -> ValidatedStep:
    values = {"loss": told["loss"], **told["metrics"]}
    return ValidatedStep(int(told["step"]), {name: _finite(each) for name, each in values.items()})


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None
