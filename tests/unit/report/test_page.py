"""A page shows the plan's own numbers, its idle times have the right causes, it needs nothing."""

from __future__ import annotations

import csv
import io
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pipeplan.cli import main
from pipeplan.lowering import lower
from pipeplan.plan import Improvement, Plan
from pipeplan.report.memory import planned_memory
from pipeplan.report.page import Page, as_csv, as_json, plan_page, render
from pipeplan.report.page.axes import Axis
from pipeplan.report.page.idle import PARTS
from pipeplan.report.page.of_plan import planned_idle, planned_timeline
from pipeplan.report.page.schedule import PlannedActivities
from pipeplan.report.page.sections import Idle, MemoryOverTime
from pipeplan.simulator import simulate
from pipeplan.testing.plans import random_plan, settle
from pipeplan.testing.plans_split import random_split_plan
from tests import handmade, handmade_offload
from tests.samples import two_stages

SEEDS = range(18)


def page_of(plan: Plan) -> Page:
    """The page of a plan and its memory."""
    return plan_page(plan, planned_memory(plan))


class Cells(HTMLParser):
    """The values of each table, row by row; None for text. And every address that is named."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[float | None]]] = {}
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.tags.append(tag)
        self.addresses += [str(known[name]) for name in ("src", "href") if name in known]
        if tag == "table":
            self._rows = self.tables.setdefault(str(known["data-table"]), [])
        elif tag == "tr":
            self._rows.append([])
        elif tag == "td":
            value = known.get("data-value")
            self._rows[-1].append(None if value is None else float(value))


@pytest.mark.parametrize("seed", SEEDS)
def test_page_and_files_say_the_same(seed: int) -> None:
    """Each number of each table is in the page, in the JSON and in the CSV, as it is."""
    plan = random_split_plan(seed) if seed % 2 else random_plan(seed)
    page = page_of(plan)
    shown = Cells(render(page)).tables
    told = json.loads(as_json(page))["tables"]
    lines = list(csv.DictReader(io.StringIO(as_csv(page))))
    tables = [table for section in page.sections for table in section.tables()]
    assert shown.keys() == told.keys() == {table.name for table in tables}
    for table in tables:
        numbers = [
            [None if cell is None or isinstance(cell, str) else float(cell) for cell in row]
            for row in table.rows
        ]
        assert shown[table.name][1:] == numbers, table.name
        assert [list(row.values()) for row in told[table.name]] == [list(r) for r in table.rows]
        mine = [line for line in lines if line["table"] == table.name]
        cells = ["" if cell is None else str(cell) for row in table.rows for cell in row]
        assert [line["value"] for line in mine] == cells


@pytest.mark.parametrize("seed", SEEDS)
def test_numbers_are_the_plans(seed: int) -> None:
    """Period, step, peaks, durations of stages and the starts of a window are the plan's."""
    plan = random_plan(seed)
    page = page_of(plan)
    told = json.loads(as_json(page))["tables"]
    figures = {row["quantity"]: row["planned"] for row in told["figures"]}
    assert figures["period"] == plan.period_ns
    assert figures["step"] == plan.step_ns
    assert [row["peak"] for row in told["peaks"]] == [row.peak_bytes for row in plan.memory]
    for row, whole in zip(told["peaks"], plan.memory, strict=True):
        terms = [each["planned"] for each in told["terms"] if each["GPU"] == row["GPU"]]
        assert sum(terms) == whole.peak_bytes
    drawn = planned_timeline(PlannedActivities(plan))
    bars = [bar for lane in drawn.lanes for bar in lane.bars if bar.kind != "OPT"]
    count = plan.microbatches if plan.semantics == "flush" else plan.k
    for op in plan.ops:
        mine = [bar for bar in bars if (bar.kind, bar.stage) == (op.kind, op.stage)]
        numbers = {bar.microbatch for bar in mine}
        assert len(numbers) >= sum(1 for each in range(count) if each % plan.k == op.copy_)
        assert {bar.end_ns - bar.start_ns for bar in mine} == {op.duration_ns}


def idle_of(plan: Plan) -> list[Idle]:
    """Of each GPU, in the plan's window."""
    return list(planned_idle(PlannedActivities(plan)))


@pytest.mark.parametrize("seed", SEEDS)
def test_idle_time_is_the_replays(seed: int) -> None:
    """Parts add up to the window; what is no work is what the replay calls its bubble."""
    plan = random_plan(seed, semantics="2bw")
    bubble = simulate(plan, lower(plan), microbatches=40 * plan.k).bubble
    for gpu, each in enumerate(idle_of(plan)):
        assert sum(time for _, time in each.parts) == each.window_ns == plan.period_ns
        assert 1 - dict(each.parts)["work"] / each.window_ns == pytest.approx(bubble[gpu])


def test_causes_by_hand() -> None:
    """Two stages: in a period both wait for messages; the causes of a whole step differ."""
    names = dict.fromkeys(PARTS, 0)
    for each in idle_of(settle(two_stages())):
        assert dict(each.parts) == names | {"work": 6, "messages": 2}
    first, second = idle_of(settle(two_stages(semantics="flush")))
    # GPU 0 keeps a place free before the second forward; before the last backward it waits for
    # the other stage, before every backward for the gradient's message.
    assert first.window_ns == 72
    assert dict(first.parts) == names | {
        "work": 48,
        "order": 6,
        "other stages": 2,
        "messages": 16,
    }
    # GPU 1 begins at 4 and ends at 66; each of its forwards but the first waits for a message.
    assert dict(second.parts) == names | {"work": 48, "fill and drain": 10, "messages": 14}


def test_offloads_have_lanes_of_their_own() -> None:
    """Ways to the host are lanes as in the terminal's picture."""
    plan = handmade_offload.two_gpus()
    names = [lane.name for lane in planned_timeline(PlannedActivities(plan)).lanes]
    assert any("host" in name for name in names)
    assert names[:2] == [gpu.name for gpu in plan.cluster.gpus]


def test_memory_is_drawn_over_a_whole_period() -> None:
    """The curve lasts as long as the period, and its largest sum is the peak."""
    plan = settle(two_stages())
    (section,) = (s for s in page_of(plan).sections if isinstance(s, MemoryOverTime))
    for each in section.series:
        assert each.length_ns == plan.period_ns
        sizes = zip(*(sizes for _, sizes in each.terms), strict=True)
        assert max(map(sum, sizes)) == each.peak_bytes


def test_a_step_ends_with_its_updates() -> None:
    """(T5): layers that are computed again are updated as one."""
    table = PlannedActivities(handmade.recomputed_whole())
    assert max(each.end_ns for each in table.within(table.step())) == table.plan.step_ns


def test_broken_plans_have_pages() -> None:
    """A GPU without operations, a wrong id and a history without bounds are shown as they are."""
    plan, two = handmade.recomputed_whole(), handmade.base(semantics="flush")
    idle = two.model_copy(update={"ops": tuple(op for op in two.ops if op.gpu != 1)})
    renamed = plan.model_copy(update={"stages": (plan.stages[0].model_copy(update={"id": 77}),)})
    steps = (Improvement(work_s=0.5, strategy="search", period_ns=(6, 1)),)
    unbounded = plan.solver.model_copy(update={"history": steps})
    for each in (idle, renamed, plan.model_copy(update={"solver": unbounded})):
        assert "One step, as planned" in render(page_of(each))


def test_the_page_needs_nothing_and_runs_nothing_foreign() -> None:
    """It names no address; a name that is markup is shown as it is written."""
    plan = settle(two_stages())
    name = '<script>alert("x")</script>'
    plan = plan.model_copy(update={"chain": plan.chain.model_copy(update={"name": name})})
    text = render(page_of(plan))
    seen = Cells(text)
    assert seen.addresses == ["data:,"]
    assert seen.tags.count("script") == 1
    assert "&lt;script&gt;alert" in text
    assert "http://" not in text
    assert "https://" not in text


def test_search_is_shown_where_it_is_known() -> None:
    """Each improvement of the plan file is a row, in ns per micro-batch."""
    plan = settle(two_stages())
    steps = (
        Improvement(work_s=0.5, strategy="search", period_ns=(20, 1)),
        Improvement(work_s=1.0, strategy="prover", period_ns=(17, 2), bound_ns=(8, 1)),
    )
    solver = plan.solver.model_copy(update={"history": steps})
    told = json.loads(as_json(page_of(plan.model_copy(update={"solver": solver}))))["tables"]
    assert [row["period"] for row in told["search"]] == [20, 8.5]
    assert [row["bound"] for row in told["search"]] == [None, 8]
    assert "search" not in json.loads(as_json(page_of(plan)))["tables"]


def test_marks_are_round_and_inside() -> None:
    """Axes begin and end anywhere; marks are few, in order, at powers of two for bytes."""
    for high in (1, 7, 999, 12345, 3 * 2**30):
        for unit in ("ns", "bytes"):
            found = Axis(0, high, unit).marks(5)
            assert 1 <= len(found) <= 7
            assert all(0 <= mark.at <= 100 for mark in found)
    sizes = [mark.label for mark in Axis(0, 3 * 2**30, "bytes").marks(4)]
    assert sizes == ["0 B", "1 GiB", "2 GiB", "3 GiB"]


def test_show_writes_page_and_data(tmp_path: Path) -> None:
    """`show --html --data` writes both; wrong endings and chains are refused."""
    plan, page, data = (str(tmp_path / name) for name in ("plan.json", "p.html", "p.csv"))
    Path(plan).write_text(settle(two_stages()).to_json())
    assert main(["show", plan, "--html", page, "--data", data]) == 0
    assert Path(page).read_text() == render(page_of(Plan.read(plan)))
    assert Path(data).read_text() == as_csv(page_of(Plan.read(plan)))
    assert main(["show", plan, "--html", page]) == 2
    assert main(["show", plan, "--html", str(tmp_path / "p.txt")]) == 2
    chain = tmp_path / "chain.json"
    chain.write_text(two_stages().chain.to_json())
    assert main(["show", str(chain), "--html", str(tmp_path / "c.html")]) == 2
