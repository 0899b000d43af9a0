"""What `compare --out` leaves in a folder: pictures, JSON, and every plan."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pipeplan.compare.launched import LaunchedPoint
from pipeplan.compare.ours import CONTIGUOUS, OURS
from pipeplan.compare.points import Comparison, ComparisonPoint
from pipeplan.compare.rows import Row
from pipeplan.plan import Plan
from pipeplan.report.cloud import Picture
from pipeplan.units import exact_bytes


def pictures(comparison: Comparison) -> Iterator[tuple[str, Picture]]:
    """(file name without ending, picture) for each number of GPUs."""
    for cloud in comparison.clouds:
        points = [each for each in comparison.points if len(each.cluster.gpus) == cloud.gpus]
        name = f"{_word(comparison.chain.name)}-{cloud.gpus}gpus"
        yield (
            name,
            Picture(
                title=f"{comparison.chain.name}, {cloud.gpus} GPUs",
                cloud=cloud.points,
                ours=_series(points, OURS),
                contiguous=_series(points, CONTIGUOUS),
                bound=[
                    (point.budget_bytes, float(point.bound_ns))
                    for point in points
                    if point.bound_ns is not None
                ],
            ),
        )


def plans(comparison: Comparison) -> Iterator[tuple[str, Plan]]:
    """(file name, plan) of every row that fits and can be run."""
    for point in comparison.points:
        for row in point.rows:
            if isinstance(row, Row) and row.fits:
                memory = exact_bytes(point.memory_bytes)
                yield f"{_word(row.name)}-{len(row.peak_bytes)}gpus-{memory}.plan.json", row.plan


def launched_name(comparison: Comparison, launched: LaunchedPoint) -> str:
    """The name of a launched point's picture, without ending."""
    gpus = len(launched.point.cluster.gpus)
    memory = exact_bytes(launched.point.memory_bytes)
    return f"{_word(comparison.chain.name)}-{gpus}gpus-{memory}-launched"


def _series(points: list[ComparisonPoint], name: str) -> list[tuple[int, float]]:
    rows = [(point, point.row(name)) for point in points]
    return [(point.budget_bytes, float(row.period_ns)) for point, row in rows if row is not None]


def _word(name: str) -> str:
    """`name` as a part of a file name."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")
