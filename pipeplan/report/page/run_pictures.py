"""Pictures that only the page of a run has: what is told per step and per validation."""

from __future__ import annotations

from collections.abc import Iterator

from pipeplan.report.page.axes import Point
from pipeplan.report.page.data import Unit
from pipeplan.report.page.pictures import Chart, line_chart
from pipeplan.report.page.run_sections import TrainingSteps, Validations


def training_charts(training: TrainingSteps) -> Iterator[Chart]:
    """Loss, gradient norm, time and throughput over the steps, each where a run tells it."""
    steps_ = training.steps
    lines: dict[str, tuple[Unit, list[tuple[int, float | None]]]] = {
        "Loss": ("number", [(each.step, each.loss) for each in steps_]),
        "Gradient norm": ("number", [(each.step, each.norm) for each in steps_]),
        "Time of a step": ("ns", [(each.step, each.step_ns) for each in steps_]),
        "Throughput": ("rate", [(each.step, each.per_s) for each in steps_]),
    }
    return _charts(lines, steps_[0].step, steps_[-1].step)


def validation_charts(validations: Validations) -> Iterator[Chart]:
    """Loss and metrics over the steps."""
    told = validations.steps
    lines: dict[str, tuple[Unit, list[tuple[int, float | None]]]] = {
        f"Validation: {name}": ("number", [(each.step, each.values.get(name)) for each in told])
        for name in validations.names
    }
    return _charts(lines, told[0].step, told[-1].step)


def _charts(
    lines: dict[str, tuple[Unit, list[tuple[int, float | None]]]], begin: int, end: int
) -> Iterator[Chart]:
    """One per line that has points, all over the same steps."""
    for name, (unit, points) in lines.items():
        known: list[Point] = [(at, value) for at, value in points if value is not None]
        if known:
            units: tuple[Unit, Unit] = ("number", unit)
            yield line_chart(name, {name: known}, begin=begin, end=end, units=units)
