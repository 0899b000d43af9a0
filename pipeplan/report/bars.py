"""Predicted and measured times as bars, one pair for each plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from pipeplan.report.picture import save
from pipeplan.units import format_ns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_THICK = 0.38
"""Of a bar; two of them share the place of 1 that a plan has."""


@dataclass(frozen=True, slots=True)
class PlanBars:
    """One plan: times in ns."""

    name: str
    predicted: float
    measured: tuple[float, ...]
    """One per round; the bar is their median, the whisker their range."""


def draw_bars(title: str, bars: Sequence[PlanBars], path: str | Path) -> None:
    """Write the picture to `path`; its ending (.png, .svg) chooses the format.

    Raises:
        InputError: if the format is unknown or the file cannot be written.
    """
    save(lambda: bars_figure(title, bars), path, dpi=120, font=9)


def bars_figure(title: str, bars: Sequence[PlanBars]) -> Figure:
    """The picture as a matplotlib figure, the first plan at the top; without any global state."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    drawn = Figure(figsize=(7.2, 1.6 + 0.5 * len(bars)), layout="constrained")
    axes = drawn.subplots()
    places = [float(place) for place in range(len(bars))]
    middle = [median(bar.measured) for bar in bars]
    below = [each - min(bar.measured) for each, bar in zip(middle, bars, strict=True)]
    above = [max(bar.measured) - each for each, bar in zip(middle, bars, strict=True)]
    axes.barh(
        [place - _THICK / 2 for place in places],
        [bar.predicted for bar in bars],
        _THICK,
        color="tab:gray",
        label="predicted",
    )
    axes.barh(
        [place + _THICK / 2 for place in places],
        middle,
        _THICK,
        xerr=[below, above],
        color="tab:blue",
        label="measured, range of rounds",
    )
    axes.set_yticks(places, [bar.name for bar in bars])
    axes.invert_yaxis()
    drawn.suptitle(title, x=0.01, horizontalalignment="left")
    axes.set_xlabel("time per micro-batch")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda time, _: format_ns(time)))
    axes.grid(axis="x", alpha=0.3)
    drawn.legend(loc="outside lower center", ncols=2)
    return drawn
