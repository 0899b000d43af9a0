"""A picture of a plan: one period of every GPU, link and way to the host, memory below it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeplan.errors import PipeplanError
from pipeplan.lowering import lower
from pipeplan.plan import Op, OpKind, Plan
from pipeplan.report.grid import GridRow, grid_rows, label, more_legends, short, window
from pipeplan.report.picture import save
from pipeplan.simulator import simulate
from pipeplan.units import counted, format_bytes, format_ns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_HEIGHT = 0.8
_FORWARD = (OpKind.F, OpKind.SEND_F, OpKind.OFFLOAD)


def draw_gantt(plan: Plan, path: str | Path) -> None:
    """Write a picture of `plan` to `path`; its ending (.png, .svg, .pdf) chooses the format.

    Raises:
        InputError: if the format is unknown or the file cannot be written.
    """
    save(lambda: gantt_figure(plan), path, dpi=150, font=8)


def gantt_figure(plan: Plan) -> Figure:
    """The picture of `plan` as a matplotlib figure, made without any global state.

    A plan that cannot be replayed has no memory to show: then only the period is drawn.
    """
    from matplotlib.figure import Figure

    lines, held = grid_rows(plan), memory_curves(plan)
    heights = [1.0 + 0.38 * len(lines), 1.8][: 2 if held else 1]
    picture = Figure(figsize=(11, sum(heights)), layout="constrained")
    axes, *below = picture.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    _draw_period(axes, plan, lines)
    if held:
        _draw_memory(below[0], plan, held)
        # Outside, where it hides no curve.
        picture.legend(loc="outside lower center", ncols=8, fontsize=7)
    return picture


def _draw_period(axes: Axes, plan: Plan, lines: Sequence[GridRow]) -> None:
    for height, row in enumerate(lines):
        for op in row.ops:
            _bar(axes, plan, op, height)
    axes.set_yticks(range(len(lines)), [row.name for row in lines])
    axes.set_ylim(len(lines) - 0.5, -0.5)
    axes.set_xlim(0, plan.period_ns)
    axes.set_xticks([0, plan.period_ns], ["0", format_ns(plan.period_ns)])
    axes.set_title(
        f"{short(plan.chain.name, 48)}: {window(plan)}, {counted(plan.k, 'micro-batch')},"
        f" {plan.semantics};"
        f" {'; '.join(['label = stage, F or B, micro-batch', *more_legends(plan)])}",
        loc="left",
    )


Curve = list[tuple[int, int]]
"""(ns within the period, bytes held from then on), in order of time."""


def memory_curves(plan: Plan) -> list[Curve]:
    """Per GPU, the bytes held over one steady period of the replay; empty without a replay."""
    try:
        simulation = simulate(plan, lower(plan))
    except PipeplanError:
        return []
    begin = (max(op.shift for op in plan.ops) + 1) * plan.period_ns
    return [
        _period(simulation.levels(gpu), begin, plan.period_ns)
        for gpu in range(len(plan.cluster.gpus))
    ]


def _period(levels: Iterator[tuple[int, int]], begin: int, period: int) -> Curve:
    """The part of a curve from `begin` on, one period long; it starts with what is held then."""
    curve = [(0, 0)]
    for time, held in levels:
        if time >= begin + period:
            break
        if time <= begin:
            curve = [(0, held)]
        else:
            curve.append((time - begin, held))
    return [*curve, (period, curve[-1][1])]


def _draw_memory(axes: Axes, plan: Plan, held: Sequence[Curve]) -> None:
    """Steps of every GPU's bytes; dashed lines are the budgets that stand in the picture."""
    from matplotlib.ticker import FuncFormatter, MultipleLocator

    top = max(size for curve in held for _, size in curve)
    for gpu, curve in enumerate(held):
        times, sizes = zip(*curve, strict=True)
        name, budget = short(plan.cluster.labels[gpu]), plan.cluster.gpus[gpu].budget_bytes
        (line,) = axes.step(times, sizes, where="post", label=name)
        if budget <= 1.5 * top:
            axes.axhline(budget, color=line.get_color(), linestyle="--", linewidth=0.8)
    axes.set_xlim(0, plan.period_ns)
    axes.set_ylim(bottom=0)
    axes.set_xticks([0, plan.period_ns], ["0", format_ns(plan.period_ns)])
    axes.yaxis.set_major_locator(MultipleLocator(2 ** max(0, (top // 3).bit_length() - 1)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda size, _: format_bytes(round(size))))
    axes.set_title("memory per GPU over the same period; dashed: the budget", loc="left")


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
    """One hue per stage, forward and what leaves light, backward dark, W between, links pale."""
    from matplotlib import colormaps

    red, green, blue, _ = colormaps["tab10"](op.stage % 10)
    shade = 0.45 if op.kind in _FORWARD else 0.65 if op.kind is OpKind.W else 0.85
    return (red, green, blue, shade * (1 if op.kind.is_compute else 0.5))
