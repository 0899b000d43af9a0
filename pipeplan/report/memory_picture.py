"""Bytes of every GPU over time, stacked by term: predicted, and measured beside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pipeplan.memory_terms import Curve, MemoryReport, Purpose
from pipeplan.report.grid import short
from pipeplan.report.memory import measured_of
from pipeplan.report.picture import save
from pipeplan.units import format_bytes, format_ns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_GPUS = 8
"""So many GPUs are drawn: the fullest ones."""


def draw_terms(report: MemoryReport, path: str | Path) -> None:
    """Write the picture to `path`; its ending (.png, .svg, .pdf) chooses the format.

    Raises:
        InputError: if the format is unknown or the file cannot be written.
    """
    save(lambda: terms_figure(report), path, dpi=130, font=8)


def terms_figure(report: MemoryReport) -> Figure:
    """One row per GPU, predicted on the left, measured on the right where a run told."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranked = sorted(range(len(report.gpus)), key=lambda gpu: -report.predicted[gpu].peak.size)
    shown, columns = sorted(ranked[:MOST_GPUS]), 2 if any(report.measured) else 1
    picture = Figure(figsize=(11, 0.6 + 2.0 * len(shown)), layout="constrained")
    grid = picture.subplots(len(shown), columns, squeeze=False, sharey="row")
    seen: set[Purpose] = set()
    for axes, gpu in zip(grid, shown, strict=True):
        budget, name = report.gpus[gpu].budget_bytes, short(report.gpus[gpu].name)
        what = "step" if report.measured else "period"
        seen |= _draw(axes[0], report.predicted[gpu].curve, budget, f"{name}: predicted period")
        found = measured_of(report, gpu)
        if found is not None and columns == 2:
            seen |= _draw(axes[1], found.curve, budget, f"{name}: measured {what} {report.step}")
    used = [purpose for purpose in Purpose if purpose in seen]
    handles = [Patch(color=_colour(each), label=each.replace("_", " ")) for each in used]
    picture.legend(handles=handles, loc="outside lower center", ncols=8, fontsize=7)
    return picture


def _draw(axes: Axes, curve: Curve, budget: int, title: str) -> set[Purpose]:
    """The terms on top of each other; dashed: the budget, where it is near."""
    from matplotlib.ticker import FuncFormatter, MultipleLocator

    axes.set_title(title, loc="left")
    if not curve.times_ns or not curve.purposes:
        return set()
    rows = list(zip(*curve.sizes, strict=True))
    colours = [_colour(purpose) for purpose in curve.purposes]
    axes.stackplot(curve.times_ns, *rows, colors=colours, step="post")
    top = max(sum(row) for row in curve.sizes)
    if budget <= 1.5 * top:
        axes.axhline(budget, color="black", linestyle="--", linewidth=0.8)
    end = max(1, curve.times_ns[-1])
    axes.set_xlim(0, end)
    axes.set_xticks([0, end], ["0", format_ns(end)])
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MultipleLocator(2 ** max(0, (top // 3).bit_length() - 1)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(round(size))))
    return set(curve.purposes)


def _colour(purpose: Purpose) -> tuple[float, float, float, float]:
    """The same in every picture."""
    from matplotlib import colormaps

    colour: tuple[float, float, float, float] = colormaps["tab20"](list(Purpose).index(purpose))
    return colour
