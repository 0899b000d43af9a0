"""The memory-period picture can be read: round marks on both axes, whatever is in it."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from pipeplan.report.cloud import Picture, cloud_figure, draw_cloud

MIB = 2**20


@pytest.mark.parametrize(
    "points",
    [
        [(30 * MIB, 33e6)],
        [(30 * MIB, 47e6), (60 * MIB, 33e6)],
        [(1024 * MIB, 256e6), (16384 * MIB, 5e6)],
        [(0, 1.0)],
    ],
)
def test_both_axes_have_marks_to_read(points: list[tuple[int, float]], tmp_path: Path) -> None:
    """At least two times and as many memories; memories are round in binary units."""
    picture = Picture("test", (), points, (), ())
    drawn = cloud_figure(picture)
    (axes,) = drawn.axes
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        marks = [mark for mark in axis.get_majorticklocs() if low <= mark <= high]
        assert 2 <= len(marks) <= 16
    unit = 2 ** max(0, max(memory for memory, _ in points).bit_length() - 6)
    assert all(mark % unit == 0 for mark in axes.get_xticks())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_cloud(picture, tmp_path / "picture.png")


def test_times_of_nothing_have_no_place(tmp_path: Path) -> None:
    """A logarithmic axis has no 0: matplotlib warned on stderr."""
    nothing, something = (30 * MIB, 0.0), (60 * MIB, 5e6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for points in ([nothing], [nothing, something]):
            draw_cloud(Picture("test", points, points, (), points), tmp_path / "picture.png")
    (axes,) = cloud_figure(Picture("test", (), [nothing, something], (), ())).axes
    assert axes.get_ylim() == pytest.approx((0.9 * 5e6, 1.5 * 5e6))


def test_each_set_of_points_has_its_name() -> None:
    """Those that are there are in the legend, the paper's ILP among them."""
    one = [(30 * MIB, 33e6)]
    for ilp in ((), one):
        (axes,) = cloud_figure(Picture("test", one, one, (), one, ilp)).axes
        names = axes.get_legend_handles_labels()[1]
        assert ("the paper's ILP" in names) == bool(ilp)
        assert {"pipeplan", "proven bound"} <= set(names)
