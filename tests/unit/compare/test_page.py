"""A comparison's page has the comparison's own numbers."""

from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest

from pipeplan.compare.launched import LaunchedPlan, LaunchedPoint, LaunchRequest
from pipeplan.compare.ours import OURS
from pipeplan.compare.page import comparison_page
from pipeplan.compare.points import Comparison, ComparisonPoint, PointCloud
from pipeplan.compare.rows import Absent
from pipeplan.compare.table import data
from pipeplan.report.page import Page, as_json, render
from pipeplan.report.page.schedule_pictures import memory_chart, periods
from pipeplan.report.page.schedule_sections import PeriodOverMemory, Schedules
from tests.compared import eager_row, machines

MEMORY = 100
FAST, SLOW = eager_row(OURS, (2, 1), MEMORY), eager_row("one in flight", (1, 1), MEMORY)
POINTS = tuple(
    ComparisonPoint(
        machines(size),
        Fraction(6),
        (FAST.on(machines(size)), SLOW.on(machines(size)), Absent("GPipe", "it has <no> room")),
    )
    for size in (10, MEMORY)
)
COMPARISON = Comparison(
    FAST.plan.chain, 8, POINTS, (PointCloud(2, ((10, 12.5), (20, 8.0), (90, 900.0)), 0),)
)


def tables(page: Page) -> dict[str, list[dict[str, Any]]]:
    """The rows of each table."""
    found: dict[str, list[dict[str, Any]]] = json.loads(as_json(page))["tables"]
    return found


def test_rows_are_the_comparisons() -> None:
    """Period, throughput, idle shares, peaks, what is over budget, what is left out and why."""
    told = tables(comparison_page(COMPARISON))
    points: Any = data(COMPARISON)["points"]
    for number, point in enumerate(points):
        judged = [row for row in point["rows"] if "absent" not in row]
        for mine, row in zip(told[f"point{number}"], judged, strict=True):
            assert mine["schedule"] == row["name"]
            assert mine["period per micro-batch"] == row["period_ns"]
            assert mine["samples"] == row["samples_per_s"]
            assert mine["idle"] == pytest.approx(row["idle"])
            assert mine["fill and drain"] == row["idle_fill_drain"]
            assert mine["largest peak"] == max(row["peak_bytes"])
            assert mine.get("over budget by") == (None if row["fits"] else row["over_bytes"])
        assert told[f"point{number}-left-out"] == [
            {"schedule": "GPipe", "reason": "it has <no> room"}
        ]
    assert any(row.get("over budget by") for row in told["point0"])


def test_bars_are_as_long_as_periods() -> None:
    """The parts of a bar add up to its period, the longest one fills its line."""
    for section in comparison_page(COMPARISON).sections:
        if isinstance(section, Schedules):
            longest = max(each.period_ns for each in section.schedules)
            for row, each in zip(periods(section).rows, section.schedules, strict=True):
                width = sum(box.width for box in row.boxes)
                assert width == pytest.approx(100 * each.period_ns / longest)
                assert ("too large" in row.name) == (each.over_bytes > 0)


def test_points_beyond_the_picture_are_in_the_table_alone() -> None:
    """A partition that takes a hundred times as long would flatten everything else."""
    page = comparison_page(COMPARISON)
    (section,) = (each for each in page.sections if isinstance(each, PeriodOverMemory))
    cloud = next(curve for curve in memory_chart(section).curves if "exhaustive" in curve.name)
    assert cloud.path.count("M") == 2
    assert len([row for row in tables(page)[section.name] if "PipeDream" in row["kind"]]) == 3


def test_launched_plans_are_predicted_and_measured() -> None:
    """Medians of rounds stand beside predictions; names are shown as they are."""
    plan = LaunchedPlan((OURS, "<b>"), FAST.plan, 100.0, [130.0, 110.0, 120.0])
    failed = LaunchedPlan(("other",), SLOW.plan, 100.0, failure="rank 0: lost")
    run = LaunchedPoint(POINTS[1], LaunchRequest("sleep"), Fraction(1), (plan, failed))
    page = comparison_page(COMPARISON, [run])
    first, second = tables(page)["launched0"]
    assert (first["planned"], first["measured"], first["error"]) == (100, 120, 0.2)
    assert second["measured"] is None
    assert "&lt;b&gt;" in render(page)
    assert "rank 0: lost" in render(page)
