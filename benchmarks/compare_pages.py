"""What docs/results/compare.md says of the kept rows, and its pictures."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import geometric_mean
from typing import Any

from pipeplan.compare.field import EXHAUSTIVE
from pipeplan.compare.ours import CONTIGUOUS, OURS
from pipeplan.report.cloud import Picture
from pipeplan.units import format_bytes

Case = dict[str, Any]
"""One network on one number of GPUs, see `benchmarks.compare.measure`."""
Point = dict[str, Any]

QUARTERS = (0.25, 0.5, 0.75)
_COMPARED = (OURS, CONTIGUOUS, EXHAUSTIVE)


def page(cases: dict[str, Case], pictured: Sequence[str]) -> str:
    """The means over all networks, then a picture and a table for each of `pictured`."""
    parts = [means(list(cases.values()))]
    for case in cases.values():
        if case["chain"] in pictured:
            parts += _section(case)
    return "\n\n".join(parts)


def means(cases: Sequence[Case]) -> str:
    """Geometric means of period / load bound at the quarters of the memory range."""
    names = dict.fromkeys(case["chain"] for case in cases)
    lines = [
        f"Geometric means of period / load bound (all work over all GPUs) over {', '.join(names)}."
        " Where PipeDream has no plan at all, the network counts for nobody.",
        "",
        "| GPUs | memory | networks | bound | pipeplan | contiguous | PipeDream, exhaustive |",
        "|---|---|---|---|---|---|---|",
    ]
    for gpus in sorted({case["gpus"] for case in cases}):
        for share in QUARTERS:
            here = [_ratios(case, share) for case in cases if case["gpus"] == gpus]
            known = [ratios for ratios in here if ratios is not None]
            if known:
                columns = (geometric_mean(column) for column in zip(*known, strict=True))
                cells = " | ".join(f"{value:.3f}" for value in columns)
                lines.append(f"| {gpus} | {share:.0%} | {len(known)} of {len(here)} | {cells} |")
    return "\n".join(lines)


def _ratios(case: Case, share: float) -> list[float] | None:
    """Bound, ours, contiguous, PipeDream over the load bound; None if one is missing."""
    if share not in case["shares"]:
        return None
    point = case["points"][case["shares"].index(share)]
    values = [point["bound_ns"], *(_period(point, name) for name in _COMPARED)]
    known = [value for value in values if value is not None]
    return [value / case["load_ns"] for value in known] if len(known) == len(values) else None


def _period(point: Point, name: str) -> float | None:
    """Of the row called `name`, if it has a plan that fits."""
    periods = (
        row["period_ns"] for row in point["rows"] if row["name"] == name and row.get("fits")
    )
    return next(periods, None)


def image(case: Case) -> str:
    """Where the picture is, from docs/."""
    return f"img/compare-{case['chain']}-{case['gpus']}gpus.png"


def picture(case: Case) -> Picture:
    """Memory and period of everyone."""
    points = case["points"]
    return Picture(
        title=f"{case['chain']}, {case['gpus']} GPUs",
        cloud=[(size, time) for size, time in case["cloud"]],
        ours=_series(points, OURS),
        contiguous=_series(points, CONTIGUOUS),
        bound=[(_memory(point), point["bound_ns"]) for point in points if point["bound_ns"]],
    )


def _series(points: Sequence[Point], name: str) -> list[tuple[int, float]]:
    rows = [(_memory(point), _period(point, name)) for point in points]
    return [(memory, period) for memory, period in rows if period is not None]


def _memory(point: Point) -> int:
    memory: int = min(point["memory_bytes"])
    return memory


def _section(case: Case) -> list[str]:
    title = f"{case['chain']}, {case['gpus']} GPUs"
    rows = [
        "| memory | pipeplan | contiguous | PipeDream | ours / PipeDream | bound | gap |",
        "|---|---|---|---|---|---|---|",
        *map(_line, case["shares"], case["points"]),
    ]
    return [
        f"## {title}",
        f"![memory and period of {title}](../{image(case)})",
        "\n".join(rows),
        f"{len(case['cloud'])} points of the exhaustive search"
        f" ({case['partitions_left_out']} partitions left out);"
        f" {case['planner_seconds']:g} s of our planner per point;"
        f" {case['seconds']:.0f} s in all, {case['cpu_seconds']:.0f} s of CPU.",
    ]


def _line(share: float, point: Point) -> str:
    ours, contiguous, theirs = (_period(point, name) for name in _COMPARED)
    bound = point["bound_ns"]
    cells = [
        f"{share:.0%}: {format_bytes(_memory(point))}",
        *map(_ms, (ours, contiguous, theirs)),
        "-" if ours is None or theirs is None else f"{ours / theirs:.3f}",
        _ms(bound),
        "-" if ours is None or not bound else f"{ours / bound - 1:.1%}",
    ]
    return f"| {' | '.join(cells)} |"


def _ms(value: float | None) -> str:
    return "none" if value is None else f"{value / 1e6:.2f}"
