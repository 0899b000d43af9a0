"""Marks of axes at round numbers, and curves as paths in a square of 1000 by 1000."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, log2, log10

from pipeplan.report.page.cells import shown
from pipeplan.report.page.data import Unit

SIDE = 1000
"""Of the square that curves are drawn in; the page stretches it."""
Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Mark:
    """A label of an axis, at so many per cent of its length."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Axis:
    """From `low` to `high`, in `unit`."""

    low: float
    high: float
    unit: Unit

    def place(self, value: float) -> float:
        """Where `value` is, from 0 to 1."""
        return (value - self.low) / ((self.high - self.low) or 1)

    def holds(self, value: float) -> bool:
        """Whether `value` lies on it."""
        return self.low <= value <= self.high

    def marks(self, most: int) -> tuple[Mark, ...]:
        """At most about `most` round values."""
        step = _round_step((self.high - self.low) / max(1, most), self.unit)
        first = -(-self.low // step)
        count = int(self.high // step - first) + 1
        values = [(first + index) * step for index in range(max(1, count))]
        return tuple(Mark(100 * self.place(value), _label(value, self.unit)) for value in values)


def _label(value: float, unit: Unit) -> str:
    """Without digits that say nothing."""
    if unit == "share":
        return f"{value:.0%}"
    number, _, name = shown(value, unit).partition(" ")
    return f"{float(number.replace(',', '')):g} {name}".strip() if name else number


def _round_step(least: float, unit: Unit) -> float:
    """The smallest round step that is `least` or more: of bytes a power of two."""
    if least <= 0:
        return 1
    if unit == "bytes":
        return float(2 ** max(0, -floor(-log2(least))))
    power = 10.0 ** floor(log10(least))
    return next(power * each for each in (1, 2, 5, 10) if power * each >= least * 0.999)


def steps(points: Sequence[Point], end: float) -> list[Point]:
    """The corners of a curve that keeps each value until the next time."""
    corners: list[Point] = []
    for (time, value), (until, _) in zip(points, [*points, (end, 0)][1:], strict=True):
        corners += [(time, value), (until, value)]
    return corners


def path(points: Sequence[Point], x: Axis, y: Axis) -> str:
    """`points` joined by lines, as the `d` of an SVG path; empty without points."""
    places = (f"{x.place(a) * SIDE:.1f} {(1 - y.place(b)) * SIDE:.1f}" for a, b in points)
    return "M" + " L".join(places) if points else ""


def area(upper: Sequence[Point], lower: Sequence[Point], x: Axis, y: Axis) -> str:
    """What lies between two curves."""
    return path([*upper, *reversed(lower)], x, y) + " Z" if upper else ""
