"""The text grid shows where and when each op runs, and hides nothing silently."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
from rich.cells import cell_len

from pipeplan.plan import Plan
from pipeplan.report.gantt import draw_gantt
from pipeplan.report.grid import HOST_LEGEND, LEGEND, SPLIT_LEGEND, grid, microbatch, short
from tests import handmade_offload, handmade_split
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


def test_halves_of_a_backward_have_letters_and_a_legend() -> None:
    """I is drawn like B, W with its own fill; a step plan shows a step."""
    head, line, legend = grid(handmade_split.one_gpu(), width=61).splitlines()
    assert head.startswith("one step: 9 ns for 1 micro-batch")
    assert line == "gpu0 |0F0---1F0---------1I0===============0B0===1W0+++++++++|"
    assert legend == f"{LEGEND}; {SPLIT_LEGEND}"


def test_a_period_of_split_backwards_is_no_step() -> None:
    """Of two micro-batches per step, one per period."""
    plan = handmade_split.one_gpu().model_copy(update={"microbatches": 2})
    assert grid(plan).startswith("one period: ")


def test_ways_to_the_host_are_rows_of_their_own() -> None:
    """Behind the links, one each way and GPU; what moves takes no GPU; the legend says more."""
    *lines, legend = grid(handmade_offload.two_gpus(), width=49).splitlines()
    assert lines[1:] == [
        "gpu0   |0F2-------0B0=======....................|",
        "gpu1   |..........1F2-------1B1=======..........|",
        "0>1    |..........F.............................|",
        "1>0    |..............................B.........|",
        "0>host |..........0O2~~~~~~~....................|",
        "host>0 |..............................0P1~~~~~~~|",
        "1>host |....................1O2~~~~~~~..........|",
        "host>1 |..........1P1~~~~~~~....................|",
    ]
    assert legend == f"{LEGEND}; {HOST_LEGEND}"


def test_a_way_that_both_directions_share_is_one_row() -> None:
    """Under the host's half duplex OFFLOAD and PREFETCH exclude each other."""
    lines = grid(handmade_offload.neighbours("half", prefetch=10), width=49).splitlines()
    assert lines[1:3] == [
        "gpu0   |0F1--1F1-------.....1B0=======0B0==.....|",
        "0-host |..........1P0~~1O1~~....................|",
    ]


def named(name: str) -> Plan:
    """A plan on a GPU, and of a chain, of that name."""
    plan = two_stages()
    first, *others = plan.cluster.gpus
    gpus = (first.model_copy(update={"name": name}), *others)
    cluster = plan.cluster.model_copy(update={"gpus": gpus})
    chain = plan.chain.model_copy(update={"name": name})
    return plan.model_copy(update={"cluster": cluster, "chain": chain})


@pytest.mark.parametrize("name", ["x" * 300, "two\nlines", "\x1b[31mred", "日本", ""])
def test_any_name_of_a_gpu_leaves_the_grid_straight(name: str) -> None:
    """Long names are shortened, no control character is printed, all rows are as wide."""
    _, *rows, _ = grid(named(name), width=60).splitlines()
    assert len(rows) == 4
    assert {cell_len(row) for row in rows} == {60}
    assert all(each.isprintable() for row in rows for each in row)


@pytest.mark.parametrize("name", ["$", "$x_1$", r"$\frac$", "x" * 300])
def test_names_are_drawn_as_they_are(name: str, tmp_path: Path) -> None:
    """A dollar begins no formula in a picture, and a long name leaves room for the plan."""
    file = tmp_path / "plan.svg"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw_gantt(named(name), file)
    comments = re.findall("<!-- (.*) -->", file.read_text())
    assert comments.count(short(name)) == 2  # the row and the legend
    assert any(text.startswith(f"{short(name, 48)}: one period") for text in comments)
