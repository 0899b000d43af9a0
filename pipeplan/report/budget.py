"""Pictures of rematerialization: memory over time, and time over budget.

Their form is that of Figures 5 and 13 to 18 of O. Beaumont, L. Eyraud-Dubois, A. Shilova, *Optimal
GPU-CPU Offloading Strategies for Deep Neural Network Training* (2020).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipeplan.report.picture import save
from pipeplan.units import byte_unit, format_bytes, format_ns, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pipeplan.remat import Rematerialization
    from pipeplan.remat.programs import ProgramOutcome


@dataclass(frozen=True, slots=True)
class Curves:
    """Lines of one diagram: (x, y) by name; a None breaks a line."""

    title: str
    x: str
    y: str
    lines: Mapping[str, Sequence[tuple[float, float | None]]]


_DPI = 110


def curves_of(title: str, points: Sequence[Mapping[str, int | None]]) -> Curves:
    """The diagram of time over budget, in the units that suit its largest values.

    Args:
        title: of the diagram.
        points: each with `budget_bytes`, and ns by method.
    """
    methods = [name for name in points[0] if name != "budget_bytes"]
    size, bytes_ = byte_unit(max(point["budget_bytes"] or 0 for point in points))
    length, time = time_unit(max(point[name] or 0 for point in points for name in methods))

    def line(method: str) -> list[tuple[float, float | None]]:
        pairs = [(point["budget_bytes"] or 0, point[method]) for point in points]
        return [(x / size, None if y is None else y / length) for x, y in pairs]

    lines = {method: line(method) for method in methods}
    return Curves(title, f"budget, {bytes_}", f"time of a micro-batch, {time}", lines)


def draw_curves(groups: Sequence[Curves], path: str | Path, columns: int = 1) -> None:
    """One diagram per entry of `groups`, `columns` side by side, in one picture."""
    save(lambda: _diagrams(groups, columns), path, dpi=_DPI)


def _diagrams(groups: Sequence[Curves], columns: int) -> Figure:
    from matplotlib.figure import Figure

    rows = -(-len(groups) // columns)
    figure = Figure(figsize=(5.2 * columns, 3.6 * rows), layout="constrained")
    every = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes, group in zip(every, groups, strict=False):
        _curves(axes, group)
    for axes in every[len(groups) :]:
        axes.set_axis_off()
    return figure


def _curves(axes: Axes, group: Curves) -> None:
    for name, points in group.lines.items():
        xs = [x for x, _ in points]
        ys = [float("nan") if y is None else y for _, y in points]
        axes.plot(xs, ys, label=name, marker=".", markersize=4, linewidth=1)
    axes.set_title(group.title, fontsize=9)
    axes.set_xlabel(group.x)
    axes.set_ylabel(group.y)
    axes.grid(linewidth=0.3)
    if group.lines:
        axes.legend(fontsize=7)


def draw_memory(found: Rematerialization, title: str, path: str | Path) -> None:
    """Bytes of device and host while the schedule runs, under the budget."""
    save(lambda: _memory(found, title), path, dpi=_DPI)


def _memory(found: Rematerialization, title: str) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.subplots()
    steps = [
        step for step in found.outcome.steps if step.op.computes or step.end_ns > step.start_ns
    ]
    runs = [step for step in steps if not step.moved]
    times = [at for step in runs for at in (step.start_ns, step.end_ns)]
    axes.fill_between(
        times, [step.bytes for step in runs for _ in "ab"], alpha=0.35, label="device"
    )
    axes.plot(times, [step.host_bytes for step in runs for _ in "ab"], linewidth=1, label="host")
    axes.axhline(found.budget, linestyle="--", linewidth=1, color="black", label="budget")
    for step in found.outcome.steps:
        if step.moved:
            axes.axvspan(step.start_ns, step.end_ns, ymax=0.02, alpha=0.6, color="tab:red")
    axes.set_title(f"{title}: {found.method}, {format_ns(found.outcome.makespan_ns)}", fontsize=9)
    axes.xaxis.set_major_formatter(FuncFormatter(_rounded(format_ns)))
    axes.yaxis.set_major_formatter(FuncFormatter(_rounded(format_bytes)))
    axes.set_xlabel("time; red below: the channel moves")
    axes.legend(fontsize=7)
    return figure


def draw_program_memory(
    outcome: ProgramOutcome, budget: int, title: str, path: str | Path
) -> None:
    """Bytes of the device while a program of operators runs, under the budget."""
    save(lambda: _program_memory(outcome, budget, title), path, dpi=_DPI)


def _program_memory(outcome: ProgramOutcome, budget: int, title: str) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(7.2, 3.8), layout="constrained")
    axes = figure.subplots()
    runs = [each for each in outcome.steps if each.end_ns > each.start_ns]
    times = [at for each in runs for at in (each.start_ns, each.end_ns)]
    held = [each.bytes for each in runs for _ in "ab"]
    axes.fill_between(times, held, alpha=0.35, label="device")
    axes.axhline(budget, linestyle="--", linewidth=1, color="black", label="budget")
    axes.axvline(outcome.forward_ns, linewidth=0.6, color="tab:gray", label="end of the forward")
    axes.set_title(f"{title}, {format_ns(outcome.makespan_ns)}", fontsize=9)
    axes.xaxis.set_major_formatter(FuncFormatter(_rounded(format_ns)))
    axes.yaxis.set_major_formatter(FuncFormatter(_rounded(format_bytes)))
    axes.set_xlabel("time")
    axes.legend(fontsize=7)
    return figure


def _rounded(text: Callable[[int], str]) -> Callable[[float, object], str]:
    return lambda value, _: text(max(0, round(value)))
