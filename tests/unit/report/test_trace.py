"""Traces of a plan and of its run have the same tracks and names, arrows and counters."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipeplan.cli import main
from pipeplan.lowering import lower
from pipeplan.report.page import read_files
from pipeplan.report.page.schedule import replayed
from pipeplan.report.run_trace import trace_of
from pipeplan.report.trace import chrome_trace
from pipeplan.simulator import simulate
from tests.unit.report.test_run_page import FLUSH, MS, as_planned, write_files

Events = list[dict[str, Any]]


def events(text: str) -> Events:
    """Of a trace file."""
    found: Events = json.loads(text)["traceEvents"]
    return found


@pytest.fixture(scope="module")
def of_plan() -> Events:
    """Of one step of two stages with 8 micro-batches."""
    simulation = simulate(FLUSH, lower(FLUSH), microbatches=8)
    levels = {gpu: simulation.levels(gpu) for gpu in (0, 1)}
    return events(chrome_trace(FLUSH, replayed(simulation.spans()), levels))


@pytest.fixture
def of_run(tmp_path: Path) -> Events:
    """Of a run that kept to the plan but for one long operation."""
    folder = write_files(tmp_path / "run", FLUSH, as_planned(FLUSH, {"0F2": 7}))
    return events(trace_of(read_files(str(folder))))


def test_counts_are_the_plans(of_plan: Events) -> None:
    """Computes, transfers, and an arrow in three parts for each transfer."""
    assert Counter(event["cat"] for event in of_plan if event["ph"] == "X") == {
        "compute": 32,
        "transfer": 16,
    }
    assert Counter(event["ph"] for event in of_plan if event["ph"] in "stf") == {
        "s": 16,
        "t": 16,
        "f": 16,
    }
    marks = {event["id"] for event in of_plan if event["ph"] == "s"}
    assert len(marks) == 16
    assert all(isinstance(mark, int) for mark in marks)


def test_arrows_lead_from_what_is_made_to_what_takes_it(of_plan: Events) -> None:
    """Each part lies at the start of the span that it is bound to; 0F3 leads to 1F3."""
    spans = {
        (event["pid"], event["tid"], event["ts"]): event["name"]
        for event in of_plan
        if event["ph"] == "X"
    }
    path = [
        spans[event["pid"], event["tid"], event["ts"]]
        for event in of_plan
        if event["name"] == "0SEND_F3"
    ]
    assert path == ["PP:0F3", "PP:0SEND_F3", "PP:1F3"]


def test_counters_reach_the_peaks(of_plan: Events) -> None:
    """The largest value of each GPU's counter is its peak."""
    for row in FLUSH.memory:
        mine = [e["args"]["bytes"] for e in of_plan if e["ph"] == "C" and e["pid"] == row.gpu]
        assert max(mine) == row.peak_bytes


def test_a_run_has_the_tracks_and_names_of_its_plan(of_plan: Events, of_run: Events) -> None:
    """Every compute of the plan is in the run, on the same track; what waited says how long."""

    def tracks(found: Events) -> dict[str, tuple[int, int]]:
        return {e["name"]: (e["pid"], e["tid"]) for e in found if e.get("cat") == "compute"}

    def names(found: Events) -> Events:
        return [event for event in found if event["ph"] == "M"]

    assert tracks(of_run) == tracks(of_plan)
    assert names(of_run) == names(of_plan)
    waits = {e["name"]: e["args"].get("waited_us") for e in of_run if e["ph"] == "X"}
    assert waits["PP:1F2"] == 9 * MS / 1000
    assert Counter(event["ph"] for event in of_run)["s"] == 16


def test_report_writes_the_trace_of_a_run_that_has_one(tmp_path: Path) -> None:
    """`report --trace` writes it; a run without times of actions is refused."""
    folder = write_files(tmp_path / "run", FLUSH, as_planned(FLUSH))
    trace = tmp_path / "trace.json"
    assert main(["report", str(folder), "--trace", str(trace)]) == 0
    assert events(trace.read_text())
    (folder / "actions.json").unlink()
    assert main(["report", str(folder), "--trace", str(trace), "--force"]) == 2
