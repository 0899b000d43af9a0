"""The text grid shows where and when each op runs, and hides nothing silently."""

from __future__ import annotations

from pipeplan.report.grid import LEGEND, grid, microbatch
from tests.samples import two_stages


def test_grid_is_the_picture_of_the_period() -> None:
    """Rows are GPUs, then links; columns are proportional to time; wrap-around is marked."""
    assert grid(two_stages(), width=47) == (
        "one period: 8 ns for 1 micro-batch; a column is 0.2 ns\n"
        "gpu0 |0F1-------..........0B0=================|\n"
        "gpu1 |<=========..........1F1-------1B1======>|\n"
        "0>1  |..........0F1~~~~~~~....................|\n"
        "1>0  |..........1B0~~~~~~~....................|\n" + LEGEND + "\n"
    )


def test_half_duplex_shows_one_row_per_pair() -> None:
    """Both directions of a half-duplex link share one row, since they exclude each other."""
    lines = grid(two_stages(duplex="half"), width=47).splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["gpu0", "gpu1", "0-1"]


def test_microbatch_numbers_are_those_of_one_steady_period() -> None:
    """The newest micro-batch enters where the shift is smallest; a shift of one is one older."""
    plan = two_stages()
    assert [microbatch(plan, op) for op in plan.ops] == [1, 1, 1, 1, 0, 0]


def test_ops_too_short_for_a_column_are_counted() -> None:
    """An op that vanishes in the rounding takes an idle column, or is counted below the grid."""
    plan = two_stages()
    tiny = plan.model_copy(update={"period_ns": 8000})
    text = grid(tiny, width=47)
    assert [line[6:9] for line in text.splitlines()[1:5]] == ["B..", "B..", "F..", "B.."]
    assert "(2 ops shorter than a column are not drawn)" in text


def test_narrow_ops_keep_their_direction() -> None:
    """An op narrower than its label shows as a capital letter that starts it."""
    plan = two_stages().model_copy(update={"period_ns": 80})
    first, second = grid(plan, width=87).splitlines()[1:3]
    assert first == "gpu0 |Ff..0B0=" + "." * 72 + "|"
    assert second == "gpu1 |....Ff1B1=" + "." * 70 + "|"


def test_marked_op_stands_out() -> None:
    """What the caller marks is filled with exclamation marks."""
    assert "1F1!!!!!!!" in grid(two_stages(), width=47, marked={"1F0"})
