"""A comparison as a page: every point's schedules, and periods over memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeplan.compare.files import pictures
from pipeplan.compare.launched import LaunchedPoint
from pipeplan.compare.launched_table import remarks, title
from pipeplan.compare.points import Comparison, ComparisonPoint
from pipeplan.compare.rows import Absent, Row
from pipeplan.compare.table import loss
from pipeplan.report.page import Page
from pipeplan.report.page.schedule_sections import JudgedSchedule, PeriodOverMemory, Schedules
from pipeplan.report.page.sections import Figure, KeyFigures, Section
from pipeplan.units import counted, format_bytes, format_ns

_CAUSES = "imbalance", "communication", "waiting", "fill_drain"
_NAMES = "uneven work", "communication", "waiting", "fill and drain"


def comparison_page(comparison: Comparison, launched: Sequence[LaunchedPoint] = ()) -> Page:
    """All that was compared, and what was launched of it."""
    sections: list[Section] = [
        _schedules(comparison, point, f"point{number}")
        for number, point in enumerate(comparison.points)
    ]
    sections += [_launched(each, f"launched{number}") for number, each in enumerate(launched)]
    lost = tuple(line for point in comparison.points if (line := loss(point)) is not None)
    return Page(
        f"Schedules for {comparison.chain.name}",
        f"{comparison.microbatches} micro-batches per update",
        (*sections, *_over_memory(comparison)),
        lost,
    )


def _schedules(comparison: Comparison, point: ComparisonPoint, name: str) -> Schedules:
    gpus, size = len(point.cluster.gpus), comparison.chain.microbatch_size
    rows = [row for row in point.rows if isinstance(row, Row)]
    bound = point.bound_ns
    return Schedules(
        name,
        f"{counted(gpus, 'GPU')} of {format_bytes(point.budget_bytes)}",
        tuple(
            JudgedSchedule(
                row.name,
                row.semantics,
                float(row.period_ns),
                row.samples_per_second(size, comparison.microbatches),
                (("work", 1 - row.bubble.total), *_causes(row)),
                max(row.peak_bytes),
                row.over_bytes,
            )
            for row in rows
        ),
        tuple((row.name, row.reason) for row in point.rows if isinstance(row, Absent)),
        "" if bound is None else f"No plan takes less than {format_ns(bound)} per micro-batch.",
    )


def _launched(launched: LaunchedPoint, name: str) -> KeyFigures:
    return KeyFigures(
        tuple(
            Figure(" = ".join(each.names), "ns", float(each.predicted_ns), each.measured_ns)
            for each in launched.plans
        ),
        title(launched).capitalize(),
        " ".join(f"{line}." for line in remarks(launched)),
        name,
    )


def _causes(row: Row) -> Iterator[tuple[str, float]]:
    for field, name in zip(_CAUSES, _NAMES, strict=True):
        yield name, getattr(row.bubble, field)


def _over_memory(comparison: Comparison) -> Iterator[PeriodOverMemory]:
    for name, picture in pictures(comparison):
        kinds = {
            "PipeDream, exhaustive": picture.cloud,
            "pipeplan, contiguous": picture.contiguous,
            "pipeplan": picture.ours,
        }
        points = tuple((kind, tuple(found)) for kind, found in kinds.items())
        yield PeriodOverMemory(name, picture.title, points, tuple(picture.bound))
