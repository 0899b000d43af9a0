"""The memory-period picture: everyone's points, our plans, the bound under all of them.

The form is that of Figures 11 to 16 of Beaumont, Eyraud-Dubois, Shilova (2020): memory of a GPU
to the right, time per micro-batch upwards (logarithmic here), blue what PipeDream's search found,
red our plans, green what the paper's own ILP found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log2
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pipeplan.report.picture import save
from pipeplan.units import format_bytes, format_ns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COARSE: Final = (1, 1.5, 2, 3, 5, 7)
_FINE: Final = (1, 1.2, 1.5, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9)
"""What times are marked of each power of ten; two at least of any picture's."""

Points = Sequence[tuple[int, float]]
"""(bytes per GPU, ns per micro-batch)."""


@dataclass(frozen=True, slots=True)
class Picture:
    """What one picture shows. `ours` and `contiguous` are by the memory they were planned for."""

    title: str
    cloud: Points
    ours: Points
    contiguous: Points
    bound: Points
    """Proven for every plan of as much memory or less, so that it is drawn as steps."""
    ilp: Points = ()
    """What the paper's literal ILP has, where it was asked."""
    hosted: Points = ()
    """Ours that keep something in the host's memory; they are among `ours`, too."""


def draw_cloud(picture: Picture, path: str | Path) -> None:
    """Write the picture to `path`; its ending (.png, .svg) chooses the format.

    Raises:
        InputError: if the format is unknown or the file cannot be written.
    """
    save(lambda: cloud_figure(picture), path, dpi=120, font=9)


def cloud_figure(picture: Picture) -> Figure:
    """The picture as a matplotlib figure, made without any global state."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = drawn.subplots()
    _scatter(axes, picture)
    axes.set_title(picture.title, loc="left")
    axes.set_xlabel("memory per GPU")
    axes.set_ylabel("period per micro-batch")
    _limit(axes, picture)
    axes.set_yscale("log")
    _mark(axes)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend()
    return drawn


def _scatter(axes: Axes, picture: Picture) -> None:
    styles = (
        (picture.cloud, "PipeDream, exhaustive", "tab:blue", ".", 12),
        (picture.contiguous, "pipeplan, contiguous", "tab:orange", "x", 36),
        (picture.ilp, "the paper's ILP", "tab:green", "s", 60),
        (picture.ours, "pipeplan", "tab:red", "o", 30),
        (picture.hosted, "pipeplan, with the host", "tab:purple", "D", 30),
    )
    for points, label, colour, marker, size in styles:
        if points:
            sizes, times = zip(*points, strict=True)
            axes.scatter(sizes, times, s=size, c=colour, marker=marker, label=label)
    if picture.bound:
        sizes, times = zip(*sorted(picture.bound), strict=True)
        axes.step(sizes, times, "k--", where="pre", linewidth=1, label="proven bound")


def _limit(axes: Axes, picture: Picture) -> None:
    """Show the memories that were asked for, and times up to half more than our longest.

    A time of 0 has no place on a logarithmic axis; where all are, the axis shows any.
    """
    asked = (*picture.ours, *picture.bound)
    if asked:
        sizes = [size for size, _ in asked]
        axes.set_xlim(0.9 * min(sizes), max(1, 1.05 * max(sizes)))
        times = [time for _, time in asked if time > 0] or [1]
        axes.set_ylim(0.9 * min(times), 1.5 * max(times))


def _mark(axes: Axes) -> None:
    """A few round memories and times, whatever the limits are."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MultipleLocator, NullFormatter

    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(MultipleLocator(2 ** max(0, floor(log2((high - low) / 4)))))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(round(size))))
    axes.tick_params(axis="x", rotation=20)
    low, high = axes.get_ylim()
    steps = _FINE if high < 10 * low else _COARSE
    axes.yaxis.set_major_locator(LogLocator(subs=steps, numticks=99))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda time, _: format_ns(time)))
    axes.yaxis.set_minor_formatter(NullFormatter())
