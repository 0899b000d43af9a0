"""A run's page: what was measured beside the plan, and which operation was late for what."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeplan.action_times import ActionTimes, TimedAction
from pipeplan.cli import main
from pipeplan.errors import InputError
from pipeplan.plan import OpKind, Plan
from pipeplan.report.page import (
    Page,
    ReplayedStep,
    as_json,
    read_files,
    replayed_rows,
    run_page,
)
from pipeplan.report.page.axes import SIDE
from pipeplan.report.page.of_run import TracedStep
from pipeplan.report.page.run_pictures import training_charts
from pipeplan.report.page.run_sections import Delay, Delays, TrainedStep, TrainingSteps
from pipeplan.report.page.schedule import PlannedActivities
from pipeplan.report.page.sections import IdleTime
from pipeplan.report.run import read
from pipeplan.testing.plans import settle
from tests.samples import two_stages
from tests.unit.report.test_run import write_run

MS = 10**6
STEP = 3
_AFTER = {OpKind.F: "SEND_F", OpKind.B: "SEND_B"}


FLUSH = settle(two_stages(semantics="flush", unit_ns=MS))
STALE = settle(two_stages(unit_ns=MS))
"""In ms for ns: waits below 0.2 ms are not noticed."""


def as_planned(plan: Plan, longer: dict[str, int] | None = None) -> ActionTimes:
    """As if a run had kept to the plan but for operations that take `longer`, in ms.

    On each GPU an operation starts behind the one before it and waits until it is due, or until
    its input is there, which comes 2 ms after it was made.
    """
    planned, extra = PlannedActivities(plan), longer or {}
    size, reach = plan.microbatches, 0 if plan.semantics == "flush" else 1
    first = (STEP - 1) * size
    offset = first if plan.semantics == "flush" else 0
    numbers = [n - offset for n in range(first - reach * size, first + (reach + 1) * size)]
    wanted = [(op.kind, op.stage) for op in plan.ops if op.kind.is_compute]
    known = [planned(kind, stage, number) for kind, stage in wanted for number in numbers]
    order = sorted((each for each in known if each is not None), key=lambda each: each.start_ns)
    free, made = [0, 0], dict[tuple[OpKind, int, int], int]()
    ranks: list[list[TimedAction]] = [[], []]
    zero = min(each.start_ns for each in order)
    for each in order:
        rank, stage, number = each.place, each.stage, each.microbatch
        assert isinstance(rank, int)
        assert each.kind != "OPT"
        source = (each.kind, stage - 1 if each.kind is OpKind.F else stage + 1, number)
        come = made.get(source, -1) + 2 * MS if source in made else None
        due = each.start_ns - zero
        start = max(due, free[rank], come or 0)
        asked = free[rank] if come is not None else start
        end = start + each.length_ns + extra.get(f"{stage}{each.kind}{number}", 0) * MS
        name = f"{stage}{each.kind}{number + offset}"
        told = TimedAction(action=name, start_ns=asked, waited_ns=start - asked, end_ns=end)
        ranks[rank].append(told)
        if (each.kind is OpKind.F) == (stage == 0):
            send = f"{stage}{_AFTER[each.kind]}{number + offset}"
            ranks[rank].append(TimedAction(action=send, start_ns=end, end_ns=end))
        made[each.kind, stage, number] = free[rank] = end
    return ActionTimes(
        plan_digest=plan.digest(),
        semantics=plan.semantics,
        microbatches=size,
        step=STEP,
        lengths_ns=(plan.period_ns * size,),
        ranks=tuple(map(tuple, ranks)),
    )


def delays_of(plan: Plan, times: ActionTimes) -> list[Delay]:
    """Of all operations."""
    (found,) = (s for s in TracedStep.of(plan, times).sections() if isinstance(s, Delays))
    return list(found.delays)


@pytest.mark.parametrize("plan", [FLUSH, STALE], ids=["flush", "2bw"])
def test_a_run_as_planned_is_as_planned(plan: Plan) -> None:
    """Bars, idle times and causes of the run are the plan's, and nothing is late."""
    step = TracedStep.of(plan, as_planned(plan))
    assert step.windows[0].length_ns == step.windows[1].length_ns
    lanes = step.timeline().lanes
    for gpu in ("gpu0", "gpu1"):
        told, done = (lane for lane in lanes if lane.name == gpu)
        assert [told.source, done.source] == ["planned", "measured"]
        bars = [
            [(bar.label, bar.start_ns, bar.end_ns) for bar in lane.bars] for lane in (told, done)
        ]
        assert bars[0] == bars[1]
    (idle,) = (section for section in step.sections() if isinstance(section, IdleTime))
    for told, done in zip(idle.gpus[::2], idle.gpus[1::2], strict=True):
        assert told.parts == done.parts
    assert {each.added_ns for each in delays_of(plan, as_planned(plan))} == {0}


def test_a_long_operation_is_told_and_what_waits_for_it() -> None:
    """0F2 takes 7 ms more: the next one on its GPU falls behind, and 1F2 waits for it."""
    found = {each.label: each for each in delays_of(FLUSH, as_planned(FLUSH, {"0F2": 7}))}
    late = {name: each.added_ns for name, each in found.items() if each.added_ns > 0}
    assert found["1F2"].why == "waited for 0F2"
    assert late["1F2"] == 7 * MS
    behind = next(each for each in found.values() if each.before == "0F2")
    assert behind.why == "0F2 took longer"
    assert behind.longer_ns == 7 * MS


def test_accounts_of_delays_add_up() -> None:
    """What each operation is late by is what all before it on its GPU added."""
    longer = {"0F1": 3, "1B2": 9, "0B4": 1, "1F5": 4}
    for plan in (FLUSH, STALE):
        by_gpu: dict[str, list[Delay]] = {}
        for each in delays_of(plan, as_planned(plan, longer)):
            by_gpu.setdefault(each.gpu, []).append(each)
        for mine in by_gpu.values():
            late = mine[0].late_ns - mine[0].added_ns
            for each in mine:
                late += each.added_ns
                assert each.late_ns == late


@pytest.mark.parametrize("plan", [FLUSH, STALE], ids=["flush", "2bw"])
def test_a_step_is_replayed_with_the_times_of_its_operations(plan: Plan) -> None:
    """One as planned takes what it took; longer operations make the replay longer.

    With backwards of 8 ms in place of 4 the second GPU takes 12 ms for each micro-batch: 2 for
    the message, whose receive is posted behind a backward, 2 for F and 8 for B. Before the first
    of them is F, behind the last one a message and B: 2, 2 and 4 ms.
    """
    found = ReplayedStep.of(plan, as_planned(plan))
    assert found is not None
    assert (found.step, found.rest) == (STEP, 0)
    assert found.replayed_ns == found.measured_ns == plan.step_ns
    found = ReplayedStep.of(plan, as_planned(plan, {f"1B{n}": 4 for n in range(-8, 32)}))
    assert found is not None
    ends = 8 * MS if plan is FLUSH else 0
    assert found.replayed_ns == 8 * 12 * MS + ends


def write_files(folder: Path, plan: Plan, times: ActionTimes) -> Path:
    """The folder of a run with what a page reads."""
    peaks = [row.peak_bytes for row in plan.memory]
    promised = {"period_ns": plan.period_ns, "step_ns": plan.step_ns, "peak_bytes": peaks}
    write_run(folder, instrumented=False, promised=promised, step_ns=plan.step_ns * 2)
    (folder / "plan.json").write_text(plan.to_json())
    (folder / "actions.json").write_text(times.to_json())
    lines = [
        {"step": n + 1, "loss": 5.0 - n / 10, "step_ns": 80 * MS + n, "units_per_s": 100.0 + n}
        for n in range(5)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    validated = [{"step": 2, "loss": 4.0, "metrics": {"hits": 0.5}}]
    validated += [{"step": 4, "loss": None, "metrics": {"hits": 0.75}}]
    validations = "".join(json.dumps(line) + "\n" for line in validated)
    (folder / "validation.jsonl").write_text(validations)
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a run with a long operation."""
    return write_files(tmp_path / "run", FLUSH, as_planned(FLUSH, {"0F2": 7}))


def tables(page: Page) -> dict[str, list[dict[str, Any]]]:
    """The page's rows by table."""
    found: dict[str, list[dict[str, Any]]] = json.loads(as_json(page))["tables"]
    return found


def test_the_page_has_the_runs_numbers(folder: Path) -> None:
    """Planned and measured figures, steps and operations are those of the files."""
    told = tables(run_page(read_files(str(folder))))
    figures = {row["quantity"]: row for row in told["figures"]}
    assert figures["step"]["planned"] == FLUSH.step_ns
    assert figures["step"]["measured"] == 2 * FLUSH.step_ns
    assert figures["step"]["error"] == 1
    step = figures["step 3, replayed with its operations' times"]
    assert step["measured"] == FLUSH.step_ns + 5 * MS  # 2 ms of a period are idle
    replayed = ReplayedStep.of(FLUSH, as_planned(FLUSH, {"0F2": 7}))
    assert replayed is not None
    assert step["planned"] == replayed.replayed_ns > FLUSH.step_ns
    assert figures["last loss"]["measured"] == 4.0
    assert [row["loss"] for row in told["training"]] == [5.0, 4.9, 4.8, 4.7, 4.6]
    assert [row["time"] for row in told["training"]] == [80 * MS + n for n in range(5)]
    assert told["validation"] == [
        {"step": 2, "loss": 4.0, "hits": 0.5},
        {"step": 4, "loss": None, "hits": 0.75},
    ]
    rows = {row["operation"]: row for row in told["operations"]}
    assert rows["0F"]["measured, mean"] == pytest.approx(2 * MS + 7 * MS / 8)
    assert rows["0F"]["longest"] == 9 * MS
    assert [rows["1B"][name] for name in ("times", "planned", "error")] == [8, 4 * MS, 0]
    assert told["delays"][0]["fell behind by"] == 7 * MS


def test_the_report_has_the_replayed_step_of_a_timed_run(folder: Path) -> None:
    """Not of one that counts bytes, nor where nothing tells of actions."""
    timed = read(str(folder))
    (row,) = replayed_rows(timed, str(folder))
    assert row.name == "flush: step 3, replayed with its operations' times"
    assert row.measured == FLUSH.step_ns + 5 * MS
    counted = timed.model_copy(update={"instrumented": True})
    assert list(replayed_rows(counted, str(folder))) == []
    (folder / "actions.json").unlink()
    assert list(replayed_rows(timed, str(folder))) == []


def test_files_of_older_runs_make_smaller_pages(folder: Path) -> None:
    """Without actions, plan or metrics the page has the rest; files of two plans are refused."""
    other = FLUSH.model_copy(update={"microbatches": 4})
    (folder / "plan.json").write_text(other.to_json())
    with pytest.raises(InputError, match=r"actions\.json: got the file of another plan"):
        read_files(str(folder))
    (folder / "actions.json").unlink()
    page = run_page(read_files(str(folder)))
    assert "timeline" not in tables(page)
    assert "too short" in page.facts[0]
    (folder / "plan.json").unlink()
    (folder / "metrics.jsonl").unlink()
    (folder / "validation.jsonl").unlink()
    assert tables(run_page(read_files(str(folder)))).keys() == {"figures"}


def test_broken_files_are_refused_by_name(folder: Path) -> None:
    """Actions of no plan and lines of no run are one line each."""
    times = as_planned(FLUSH)
    swapped = times.model_copy(update={"ranks": times.ranks[::-1]})
    (folder / "actions.json").write_text(swapped.to_json())
    with pytest.raises(InputError, match=r"actions\.json: got 1F16 on rank 0"):
        run_page(read_files(str(folder)))
    endless = b'{"step": 1, "loss": 1, "step_ns": Infinity, "units_per_s": 1}\n'
    for content in (b'{"step": 1}\n', endless, b"\xff\n"):
        (folder / "metrics.jsonl").write_bytes(content)
        with pytest.raises(InputError, match=r"metrics\.jsonl: "):
            read_files(str(folder))


def test_charts_hold_their_lowest_value() -> None:
    """A loss below zero is inside, and where none is the axis ends at zero."""
    steps = tuple(TrainedStep(n, loss, 1, 0.0) for n, loss in ((1, -2.0), (2, 3.0)))
    loss, _, throughput = training_charts(TrainingSteps(steps))
    heights = [float(corner.split()[1]) for corner in loss.curves[0].path[1:].split(" L")]
    assert 0 < heights[1] < heights[0] < SIDE
    assert throughput.curves[0].path == f"M0.0 {SIDE}.0 L{SIDE}.0 {SIDE}.0"


def test_report_writes_a_page_of_one_run(folder: Path, tmp_path: Path) -> None:
    """`report --html` takes one run; two have no page in common."""
    page = str(tmp_path / "run.html")
    assert main(["report", str(folder), "--html", page]) == 0
    assert "Step 3, plan over run" in Path(page).read_text()
    both = [str(folder), str(folder), "--html", str(tmp_path / "two.html")]
    assert main(["report", *both]) == 2
