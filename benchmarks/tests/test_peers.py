"""Peers within the same memory: which rows there are, who is best, who loses."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import peers
from benchmarks.peers import Case
from pipeplan.compare.families import STEP_FAMILIES


def row(mine: int | None, *theirs: tuple[str, int]) -> dict[str, Any]:
    """A measured row: our step, and names and steps of those that fit."""
    ours = {"load_ns": 100.0, "limit_s": 1.0} | ({} if mine is None else {"step_ns": mine})
    steps = {name: {"step_ns": step, "detail": ""} for name, step in theirs}
    return {"ours": ours, "peers": {"memory_bytes": 1, "steps": steps}}


def test_rows_are_many_and_of_every_kind() -> None:
    """At least 60; every memory with every number of GPUs, which has all micro-batches."""
    found = list(peers.cases())
    assert len(found) >= 60
    assert len({case.key for case in found}) == len(found)
    kinds = Counter((case.gpus, case.microbatches // case.gpus, case.share) for case in found)
    assert set(kinds) == {
        (gpus, times, share)
        for gpus in peers.GPUS
        for times in peers.TIMES
        for share in peers.SHARES
    }
    assert {case.name for case in peers.cases(["uneven"])} == {"uneven"}


def test_the_best_peer_is_the_fastest_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all memory the fastest way of each schedule, with 1F1B's those that need no more."""
    case = Case("uneven", 2, 4, 1.0)
    setting = peers.Setting(peers.uneven(), peers.cluster(2, peers.ROOM), microbatches=4)
    names = ("GPipe", "1F1B with flush", "ZB-H2")
    rows = [row for name in names for row in STEP_FAMILIES[name](setting, name, 4)]
    monkeypatch.setattr(peers, "field", lambda *_: tuple(rows))
    peak = max(next(each for each in rows if each.name == "1F1B with flush").peak_bytes)
    assert peers.memory_of(case) == peak
    assert set(peers.peers(case)["steps"]) == {"1F1B with flush"}
    roomy = peers.peers(case._replace(share=10))["steps"]
    assert set(roomy) == set(names)
    for name in names:
        least = min(each.period_ns for each in rows if each.name == name)
        assert roomy[name]["step_ns"] == 4 * least
    assert peers.best({"peers": {"steps": roomy}}) == ("ZB-H2", roomy["ZB-H2"]["step_ns"])
    rows[:] = [replace(each, peak_bytes=(peak + 1, 0)) for each in rows]
    assert peers.peers(case._replace(share=0.1))["steps"] == {}


def test_our_plan_is_judged_alike() -> None:
    """On two GPUs with room: a step between the load and the time of one after the other."""
    case = Case("uneven", 2, 4, 1.2)
    found = peers.ours(case, peers.memory_of(case), 0.4)
    assert found["k"] == 4
    assert found["load_ns"] < found["step_ns"] < 2 * found["load_ns"]


def test_losses_are_named_and_means_are_geometric() -> None:
    """Two rows with both: 4 and 1 make 2; a peer that fits alone is a loss as a faster one is."""
    cases = [Case("one", 4, 4, 1.0), Case("two", 4, 4, 1.0), Case("three", 4, 4, 0.5)]
    rows = [row(100, ("a", 400), ("b", 500)), row(200, ("a", 300), ("b", 200)), row(90)]
    lines = list(peers.summary(list(zip(cases, rows, strict=True))))
    assert lines[0] == "3 rows: in 2 ours and a peer fit, in 1 ours alone"
    assert lines[1] == "geometric mean of best peer / ours: 2.0000, at most 4.0000"
    assert lines[-1] == "rows with a faster peer: none"
    rows[1:] = [row(200, ("b", 199)), row(None, ("a", 300))]
    lost = list(peers.summary(list(zip(cases, rows, strict=True))))[-1]
    assert lost.endswith("two 4 GPUs m=4 1 (b), three 4 GPUs m=4 0.5 (a)")


def test_lines_of_the_table() -> None:
    """Steps over the load; a dash where nothing fits."""
    case = Case("one", 4, 8, 0.75)
    assert peers.cells(case, row(110, ("a", 121)))[2:] == (
        *("8", "75%", "1.1000", "1.2100", "a", "1.1000"),
    )
    assert peers.cells(case, row(None))[4:] == ("-", "-", "", "-")


def test_what_is_said_in_short() -> None:
    """The mean of rows where both fit; a row where a peer alone fits counts as lost."""
    rows = [row(100, ("a", 400)), row(200, ("a", 200)), row(None, ("a", 300))]
    found = {case.key: each for case, each in zip(peers.cases(), rows, strict=False)}
    said = peers.in_short(found)
    assert "takes 2.00 times as long, in the geometric mean of 2 instances" in said
    assert "it is faster in 1 of them" in said
