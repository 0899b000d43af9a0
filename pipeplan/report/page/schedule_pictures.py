"""Pictures of a comparison: how long schedules take and why, and periods over memory."""

from __future__ import annotations

from collections.abc import Sequence

from pipeplan.report.page.axes import SIDE, Axis, Point, path
from pipeplan.report.page.cells import shown
from pipeplan.report.page.pictures import Box, BoxPicture, BoxRow, Chart, ChartCurve
from pipeplan.report.page.schedule_sections import JudgedSchedule, PeriodOverMemory, Schedules

_PARTS = ("work", "order", "messages", "stages", "fill")
"""Classes of work and of each cause."""


def periods(section: Schedules) -> BoxPicture:
    """A bar of each schedule, as long as its period, divided into work and causes of idle time."""
    longest = max((each.period_ns for each in section.schedules), default=1.0)
    rows = tuple(_row(each, longest) for each in section.schedules)
    names = [name for name, _ in section.schedules[0].parts] if section.schedules else []
    marks = Axis(0, longest, "ns").marks(4)
    return BoxPicture(rows, marks, tuple(zip(_PARTS, names, strict=False)))


def _row(each: JudgedSchedule, longest: float) -> BoxRow:
    left, boxes = 0.0, []
    for (name, share), style in zip(each.parts, _PARTS, strict=True):
        time = share * each.period_ns
        if time > 0:
            tip = f"{each.name}: {name} {shown(time, 'ns')}, {share:.1%}"
            width = 100 * time / longest
            boxes.append(Box(left, width, f"{share:.0%}", tip, style, round(time)))
            left += width
    fits = "" if each.over_bytes <= 0 else " (too large)"
    return BoxRow(f"{each.name}{fits}", "planned", tuple(boxes))


def memory_chart(section: PeriodOverMemory) -> Chart:
    """Dots of each kind, the bound as steps; around the memories and periods of our plans."""
    asked = [point for _, points in section.points[1:] for point in points] + list(section.bound)
    inside = asked or [point for _, points in section.points for point in points] or [(1, 1.0)]
    sizes, times = ([point[place] for point in inside] for place in (0, 1))
    x = Axis(0.9 * min(sizes), 1.05 * max(sizes), "bytes")
    y = Axis(0.9 * min(times), 1.5 * max(times), "ns")
    curves, legend = [], []
    for index, (name, points) in enumerate(section.points):
        seen = [point for point in points if x.holds(point[0]) and y.holds(point[1])]
        if seen:
            curves.append(ChartCurve(name, _dots(seen, x, y), f"dots d{index}"))
            legend.append((f"d{index}", name))
    if section.bound:
        lowest = path(_falling(section.bound), x, y)
        curves.append(ChartCurve("proven bound", lowest, "line budget"))
        legend.append(("budget", "proven bound"))
    title = "Period per micro-batch over memory per GPU"
    return Chart(title, tuple(curves), x.marks(4), y.marks(4), tuple(legend))


def _dots(points: Sequence[Point], x: Axis, y: Axis) -> str:
    """Lines without length, whose round ends are the dots."""
    return " ".join(
        f"M{x.place(a) * SIDE:.1f} {(1 - y.place(b)) * SIDE:.1f} h0" for a, b in points
    )


def _falling(bound: Sequence[Point]) -> list[Point]:
    """Steps: what holds for a memory holds for less of it."""
    corners: list[Point] = []
    for size, time in sorted(bound):
        if corners:
            corners.append((corners[-1][0], time))
        corners.append((size, time))
    return corners
