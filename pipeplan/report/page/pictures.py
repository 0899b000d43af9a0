"""What the template draws: places in per cent, classes of colours, words for tooltips."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeplan.memory_terms import Purpose
from pipeplan.report.page.axes import Axis, Mark, Point, area, path, steps
from pipeplan.report.page.cells import shown
from pipeplan.report.page.data import Unit
from pipeplan.report.page.sections import (
    Bar,
    IdleTime,
    MemoryOverTime,
    MemorySeries,
    SearchProgress,
    Timeline,
)
from pipeplan.units import format_bytes, format_ns

COLOURS = 8
"""So many stages have colours of their own."""
_READABLE = 34
"""Pixels of a bar whose label can be read."""
_UNREAD = 0.1
"""Share of the time whose bars may be too short for a label."""
_WIDEST = 4000


@dataclass(frozen=True, slots=True)
class Box:
    """A bar, from `left` over `width` per cent."""

    left: float
    width: float
    label: str
    tip: str
    style: str
    """Classes that colour it."""
    value: int
    """Its length, in the unit of the picture."""


@dataclass(frozen=True, slots=True)
class BoxRow:
    """BoxPicture on one line."""

    name: str
    source: str
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class BoxPicture:
    """Lines of boxes over one axis; scrolled where it is narrower than `width` pixels."""

    rows: tuple[BoxRow, ...]
    marks: tuple[Mark, ...]
    legend: tuple[tuple[str, str], ...]
    """(class, name)."""
    width: int = 0

    @property
    def both(self) -> bool:
        """Whether it shows planned and measured lines."""
        return len({row.source for row in self.rows}) > 1


@dataclass(frozen=True, slots=True)
class ChartCurve:
    """A filled or a plain line."""

    name: str
    path: str
    style: str
    tip: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over two axes."""

    title: str
    curves: tuple[ChartCurve, ...]
    x: tuple[Mark, ...]
    y: tuple[Mark, ...]
    legend: tuple[tuple[str, str], ...] = ()


def gantt(timeline: Timeline) -> BoxPicture:
    """The bars of a timeline, cut off at its ends."""
    length = max(1, timeline.length_ns)
    rows = []
    for lane in timeline.lanes:
        blocks = [_bar(bar, length) for bar in lane.bars if _inside(bar, length)]
        waits = [_wait(bar, length) for bar in lane.bars if bar.waited_ns]
        rows.append(BoxRow(lane.name, lane.source, (*waits, *blocks)))
    used = {block.style for row in rows for block in row.boxes}
    width = _readable_width(timeline)
    marks = Axis(0, length, "ns").marks(max(4, width // 180))
    return BoxPicture(tuple(rows), marks, tuple(_gantt_legend(used)), width)


def _readable_width(timeline: Timeline) -> int:
    """Pixels at which nearly all of the time is in bars whose labels can be read."""
    lasting = [bar.end_ns - bar.start_ns for lane in timeline.lanes for bar in lane.bars]
    left = _UNREAD * sum(lasting)
    for time in sorted(lasting):
        left -= time
        if left < 0:
            return min(_WIDEST, _READABLE * timeline.length_ns // max(1, time))
    return 0


def _inside(bar: Bar, length: int) -> bool:
    return bar.end_ns > 0 and bar.start_ns < length


def _bar(bar: Bar, length: int) -> Box:
    begin, end = max(0, bar.start_ns), min(length, bar.end_ns)
    lasts = bar.end_ns - bar.start_ns
    waited = f", waited {format_ns(bar.waited_ns)}" if bar.waited_ns else ""
    tip = f"{bar.label}: {format_ns(lasts)}, from {format_ns(bar.start_ns)}{waited}"
    style = f"s{bar.stage % COLOURS} {_kind(bar.kind)}"
    return Box(100 * begin / length, 100 * (end - begin) / length, bar.label, tip, style, lasts)


def _wait(bar: Bar, length: int) -> Box:
    begin = max(0, bar.start_ns - bar.waited_ns)
    width = max(0, min(length, bar.start_ns) - begin)
    tip = f"{bar.label} waits for its input: {format_ns(bar.waited_ns)}"
    return Box(100 * begin / length, 100 * width / length, "", tip, "wait", bar.waited_ns)


def _kind(kind: str) -> str:
    """The class of an operation's kind."""
    names = {"F": "forward", "B": "backward", "I": "backward", "W": "weights", "OPT": "update"}
    return names.get(kind, "transfer")


def _gantt_legend(used: set[str]) -> Iterator[tuple[str, str]]:
    names = {
        "forward": "F, forward",
        "backward": "B or I, backward",
        "weights": "W, gradients of weights",
        "update": "optimizer",
        "transfer": "transfer",
        "wait": "waits for its input",
    }
    for kind, name in names.items():
        if any(kind in style.split() for style in used):
            yield (kind if kind in ("update", "wait") else f"s4 {kind}"), name


_PARTS = ("work", "fill", "stages", "messages", "order")


def shares(idle: IdleTime) -> BoxPicture:
    """How each GPU spends its window, as parts of a line."""
    rows = []
    for each in idle.gpus:
        left, blocks = 0.0, []
        for (name, time), style in zip(each.parts, _PARTS, strict=True):
            share = time / max(1, each.window_ns)
            tip = f"{name}: {format_ns(time)}, {share:.1%}"
            if time:
                blocks.append(Box(100 * left, 100 * share, f"{share:.0%}", tip, style, time))
            left += share
        rows.append(BoxRow(each.gpu, each.source, tuple(blocks)))
    names = [name for name, _ in idle.gpus[0].parts] if idle.gpus else []
    return BoxPicture(
        tuple(rows), Axis(0, 1, "share").marks(4), tuple(zip(_PARTS, names, strict=False))
    )


P = Purpose
_GROUPS: tuple[tuple[str, str, tuple[Purpose, ...]], ...] = (
    ("m0", "weights", (P.WEIGHTS,)),
    ("m1", "older weights", (P.OLDER_WEIGHTS,)),
    ("m2", "gradients", (P.GRADIENTS, P.WAITING_GRADIENTS)),
    ("m3", "optimizer and buffers", (P.OPTIMIZER,)),
    ("m4", "saved activations", (P.SAVED, P.SAVED_FOR_W)),
    ("m5", "workspace", (P.WORK_F, P.WORK_B, P.WORK_I, P.WORK_W, P.UPDATE)),
    ("m6", "messages", (P.SENT_F, P.SENT_B, P.RECEIVED_F, P.RECEIVED_B)),
    ("m7", "between stages of the GPU", (P.DIRECT_F, P.DIRECT_B)),
    ("m8", "other", (P.OTHER,)),
)
"""Class, name and purposes of each colour, from the bottom upwards."""


def memory_charts(memory: MemoryOverTime) -> tuple[Chart, ...]:
    """One chart per series; those of a GPU have one scale."""
    return tuple(_memory_chart(each, memory) for each in memory.series if each.times_ns)


def _memory_chart(series: MemorySeries, memory: MemoryOverTime) -> Chart:
    largest = max(each.peak_bytes for each in memory.series if each.gpu == series.gpu)
    near = series.budget_bytes <= 1.5 * largest
    top = 1.08 * max(series.budget_bytes if near else 0, largest, 1)
    x, y = Axis(0, max(1, series.length_ns), "ns"), Axis(0, top, "bytes")
    curves = []
    below = [0] * len(series.times_ns)
    for style, name, purposes in _GROUPS:
        mine = [sizes for term, sizes in series.terms if Purpose(term) in purposes]
        if not mine:
            continue
        above = [sum(each) for each in zip(below, *mine, strict=True)]
        upper, lower = _steps(series, above), _steps(series, below)
        curves.append(ChartCurve(name, area(upper, lower, x, y), f"area {style}"))
        below = above
    if near:
        line = path([(0, series.budget_bytes), (x.high, series.budget_bytes)], x, y)
        curves.append(ChartCurve("budget", line, "line budget"))
    at = f" at {series.peak_at}" if series.peak_at else ""
    title = (
        f"{series.gpu}, {series.source}: peak {format_bytes(series.peak_bytes)}{at},"
        f" budget {format_bytes(series.budget_bytes)}"
    )
    return Chart(title, tuple(curves), x.marks(4), y.marks(4))


def memory_legend(charts: Sequence[Chart]) -> tuple[tuple[str, str], ...]:
    """Of the terms that any of the charts shows."""
    used = {curve.name for chart in charts for curve in chart.curves}
    terms = [(style, name) for style, name, _ in _GROUPS]
    return tuple(each for each in (*terms, ("budget", "budget")) if each[1] in used)


def _steps(series: MemorySeries, sizes: Sequence[int]) -> list[Point]:
    return steps(list(zip(series.times_ns, sizes, strict=True)), series.length_ns)


def search_chart(search: SearchProgress) -> Chart:
    """The best period so far and the highest bound so far over the time of the search."""
    end = max(each.work_s for each in search.steps) * 1.05 or 1.0
    lines = {
        "best period per micro-batch": [(each.work_s, each.period_ns) for each in search.steps],
        "proven bound": [(each.work_s, each.bound_ns) for each in search.steps],
    }
    known = {
        name: [(at, value) for at, value in points if value is not None]
        for name, points in lines.items()
    }
    return line_chart("Period and bound", known, end=end, units=("seconds", "ns"), stepped=True)


def line_chart(
    title: str,
    lines: dict[str, list[Point]],
    *,
    end: float,
    units: tuple[Unit, Unit],
    stepped: bool = False,
    begin: float = 0,
) -> Chart:
    """Lines in colours of their own; the vertical axis begins near the lowest value.

    It begins below zero only where a value does: nobody reads a negative time.
    """
    values = [value for points in lines.values() for _, value in points] or [0.0]
    low, high = min(values), max(values)
    room = 0.08 * (high - low or abs(high) or 1)
    bottom = low - room if low < 0 else max(0.0, low - room)
    x, y = Axis(begin, end, units[0]), Axis(bottom, high + room, units[1])
    curves, legend = [], []
    for index, (name, points) in enumerate(lines.items()):
        style = f"l{index}"
        corners = steps(points, end) if stepped else points
        curves.append(ChartCurve(name, path(corners, x, y), f"line {style}"))
        last = f", {shown(points[-1][1], units[1])} at last" if points else ""
        legend.append((style, f"{name}{last}"))
    return Chart(title, tuple(curves), x.marks(4), y.marks(4), tuple(legend))
