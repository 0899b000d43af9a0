"""A picture of a plan: one period of every GPU and link, the memory of each GPU below it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeplan.errors import InputError
from pipeplan.plan import Op, OpKind, Plan
from pipeplan.report.grid import label, rows
from pipeplan.units import format_ns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HEIGHT = 0.8
_SHADE = {OpKind.F: 0.45, OpKind.B: 0.85, OpKind.SEND_F: 0.45, OpKind.SEND_B: 0.85}


def draw(plan: Plan, path: str | Path) -> None:
    """Write a picture of `plan` to `path`; its ending (.png, .svg, .pdf) chooses the format.

    Raises:
        InputError: if the format is unknown or the file cannot be written.
    """
    import matplotlib

    # Fixed ids and no date: the same plan gives the same file, byte for byte.
    with matplotlib.rc_context({"svg.hashsalt": "pipeplan", "font.size": 8}):
        picture = figure(plan)
        metadata = {"Date": None} if str(path).endswith(".svg") else None
        try:
            picture.savefig(str(path), dpi=150, metadata=metadata)
        except (OSError, ValueError) as error:
            raise InputError(f"picture {path}: cannot be written: {error}") from None


def figure(plan: Plan) -> Figure:
    """The picture of `plan` as a matplotlib figure, made without any global state."""
    from matplotlib.figure import Figure

    lines = rows(plan)
    picture = Figure(figsize=(11, 1.1 + 0.38 * len(lines)), layout="constrained")
    axes = picture.add_subplot()
    for height, row in enumerate(lines):
        for op in row.ops:
            _bar(axes, plan, op, height)
    axes.set_yticks(range(len(lines)), [row.name for row in lines])
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_xlim(0, plan.period_ns)
    axes.set_xticks([0, plan.period_ns], ["0", format_ns(plan.period_ns)])
    axes.set_title(
        f"{plan.chain.name}: one period, {plan.k} micro-batch(es), {plan.semantics};"
        " label = stage, F or B, micro-batch",
        loc="left",
    )
    return picture


def _bar(axes: Axes, plan: Plan, op: Op, height: int) -> None:
    """One op; what crosses the end of the period is drawn at both sides, the axes clip it."""
    for earlier in (0, 1):
        start = op.start_ns - earlier * plan.period_ns
        end = start + op.duration_ns
        if end <= 0:
            continue
        axes.barh(
            height,
            op.duration_ns,
            left=start,
            height=_HEIGHT,
            color=_colour(op),
            edgecolor="black",
            linewidth=0.5,
        )
        seen = min(end, plan.period_ns) - max(start, 0)
        if seen > plan.period_ns / 40:
            middle = max(start, 0) + seen / 2
            axes.text(middle, height, label(plan, op, earlier), ha="center", va="center")


def _colour(op: Op) -> Any:
    """One hue per stage, forward light, backward dark, transfers pale."""
    from matplotlib import colormaps

    red, green, blue, _ = colormaps["tab10"](op.stage % 10)
    return (red, green, blue, _SHADE[op.kind] * (1 if op.kind.is_compute else 0.5))
