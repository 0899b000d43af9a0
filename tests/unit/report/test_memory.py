"""The memory report says of every byte what it is for, as tables, CSV, JSON and a picture."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import jsonschema
import pytest
from rich.console import Console

from pipeplan import schemas
from pipeplan.cli import main
from pipeplan.errors import InputError
from pipeplan.memory_terms import GpuTerms, Instant, MemoryReport, Purpose, Term
from pipeplan.plan import Plan
from pipeplan.report import grid, memory_advice, memory_picture, memory_tables
from pipeplan.report.memory import (
    FILE,
    as_csv,
    compared,
    over_budget,
    planned_memory,
    slack_bytes,
    with_measured,
)
from pipeplan.testing.plans import random_plan, settle
from pipeplan.testing.plans_split import random_split_plan
from pipeplan.units import format_bytes
from tests import handmade_offload
from tests.samples import two_stages
from tests.unit.report.test_run import write_run
from tests.unit.simulator.test_riding import riding_plan


def report_of(plan: Plan) -> MemoryReport:
    """Of a plan that can be replayed."""
    made = planned_memory(plan)
    assert made is not None
    return made


def shifted(memory: GpuTerms, more: int) -> GpuTerms:
    """The same with `more` bytes of something that no plan has, in stage 0."""
    extra = Term(purpose=Purpose.OTHER, stage=0, each_bytes=more)
    instants = tuple(
        each.model_copy(update={"terms": (*each.terms, extra)}) for each in memory.instants
    )
    return memory.model_copy(update={"instants": instants})


def measured(plan: Plan, more: int = 0) -> MemoryReport:
    """As if a run had held what was predicted, and `more` bytes on the first GPU."""
    made = report_of(plan)
    found = [(2, memory) for memory in made.predicted]
    if more:
        found[0] = (2, shifted(found[0][1], more))
    return with_measured(made, found, [None] * len(found))


def printed(report: MemoryReport, width: int = 100) -> list[str]:
    """The lines of all tables."""
    out = io.StringIO()
    console = Console(file=out, width=width)
    for part in memory_tables.memory_tables(report):
        console.print(part)
    return out.getvalue().splitlines()


TWO = settle(two_stages())
PLANS = [TWO, handmade_offload.two_gpus()] + [
    make(seed) for make in (random_plan, random_split_plan) for seed in range(6)
]


@pytest.mark.parametrize("index", range(len(PLANS)))
def test_everything_adds_up(index: int) -> None:
    """Rows of the CSV add up to the peak; the file is read back as it was and fits its schema."""
    plan = PLANS[index]
    report = measured(plan)
    rows = list(csv.DictReader(io.StringIO(as_csv(report))))
    for gpu, row in enumerate(plan.memory):
        mine = [each for each in rows if each["gpu"] == str(gpu)]
        terms = [each for each in mine if each["stage"]]
        whole = {each["term"]: each for each in mine if not each["stage"]}
        for column in ("predicted_bytes", "measured_bytes"):
            assert sum(int(each[column]) for each in terms) == int(whole["peak"][column])
            assert int(whole["slack"][column]) == row.budget_bytes - row.peak_bytes
        assert int(whole["peak"]["predicted_bytes"]) == row.peak_bytes
        assert int(whole["on_host"]["predicted_bytes"]) == row.host_bytes
        for each in terms:
            parts = [part.split("x") for part in each["predicted_parts"].split("+")]
            assert sum(int(n) * int(size) for n, size in parts) == int(each["predicted_bytes"])
    again = MemoryReport.from_json(report.to_json())
    assert again == report
    jsonschema.validate(json.loads(report.to_json()), schemas.load("memory"))


@pytest.mark.parametrize("index", range(len(PLANS)))
def test_tables_fit_100_columns(index: int) -> None:
    """Nothing is cut off, of a plan alone and of a run; the sum stands below the terms."""
    for report in (report_of(PLANS[index]), measured(PLANS[index])):
        lines = printed(report)
        assert max(map(len, lines)) <= 100
        assert not [line for line in lines if "…" in line.replace(" …", "")]
        assert sum("│peak, " in line for line in lines) == len(report.gpus)


def test_a_difference_is_shown_and_not_hidden() -> None:
    """A term that only the run has stands in its own row, with an infinite error."""
    report = measured(TWO, 8)
    assert [(each.purpose, each.predicted, each.measured) for each in compared(report, 0)][-1] == (
        Purpose.OTHER,
        0,
        8,
    )
    rows = [line.split("│") for line in printed(report) if "other" in line]
    assert [[cell.strip() for cell in row[-4:-1]] for row in rows] == [["0 B", "8 B", "-"]]
    more = 8 / TWO.memory[0].peak_bytes
    assert any(f"{more:+.2%}" in line and "gpu0" in line for line in printed(report))


def test_a_run_over_its_budget_is_told() -> None:
    """What is left is counted from what was measured; one line says which GPU held too much."""
    room = min(each.budget_bytes - each.peak_bytes for each in TWO.memory[:1])
    assert not over_budget(report_of(TWO))
    assert not over_budget(measured(TWO, room))
    report = measured(TWO, room + 8)
    assert slack_bytes(report, 0) == -8
    (line,) = over_budget(report)
    assert line.startswith(f"{report.gpus[0].name} held 8 B more than its budget of ")
    assert " ".join(line.split()) in " ".join(" ".join(printed(report, 400)).split())


def test_of_equal_instants_the_predicted_kind_is_compared() -> None:
    """Where a run reaches its peak twice, its terms are those of the action the plan names."""
    instants = tuple(
        Instant(
            time_ns=time,
            action=action,
            terms=(Term(purpose=purpose, stage=0, each_bytes=size),),
        )
        for time, action, purpose, size in (
            (0, "0F3", Purpose.WORK_F, 9),
            (5, "0B2", Purpose.WORK_B, 9),
            (7, "0OPT", Purpose.UPDATE, 5),
        )
    )
    memory = GpuTerms(instants=instants)
    assert memory.like(instants[1].model_copy(update={"action": "0B7"})) is instants[1]
    assert memory.like(instants[2]) is instants[0]
    assert memory.peak is instants[0]
    assert memory.following is instants[1]
    assert [each.kind for each in instants] == ["0F", "0B", "0OPT"]
    ended = instants[0].model_copy(update={"action": "end of 10SEND_F12"})
    assert ended.kind == "10SEND_F"


def test_advice_names_term_layer_and_what_is_next() -> None:
    """What dominates the peak, which layer has most of that, which other actions are as high."""
    for plan in PLANS:
        for memory in report_of(plan).predicted:
            line = memory_advice.lower_peak(plan, memory)
            if not memory.peak.size:
                assert not line
                continue
            assert memory.peak.action in line
            high = [
                each.kind
                for each in memory.instants[1:]
                if each.size > memory.peak.size * 90 // 100
            ]
            for kind in high:
                assert kind in line.partition(" and nearly as much at ")[2].partition(". ")[0]
    told = report_of(TWO).gpus[0].lower
    assert "The largest part is workspace of stage 0, 16 B." in told
    assert "Most of it is of layer 0 (a): 8 B, enough." in told
    away = report_of(handmade_offload.two_gpus())
    lines = [room.lower for room in away.gpus]
    assert any("Then the most is" in line for line in lines), lines
    assert any("One micro-batch less is" in line for line in lines), lines


def test_rows_of_gpus_with_one_name_can_be_told_apart() -> None:
    """In tables and pictures."""
    gpus = tuple(gpu.model_copy(update={"name": "A100"}) for gpu in TWO.cluster.gpus)
    plan = TWO.model_copy(update={"cluster": TWO.cluster.model_copy(update={"gpus": gpus})})
    assert [room.name for room in report_of(plan).gpus] == ["A100 0", "A100 1"]
    lines = grid.grid(plan, width=80).splitlines()
    assert [line.partition("|")[0].strip() for line in lines[1:3]] == ["A100 0", "A100 1"]


def test_what_a_plan_says_beyond_its_terms_is_told() -> None:
    """A tensor that several layers take as it is counts for each of them in the plan's peak."""
    told = 0
    for seed in range(12):
        plan = riding_plan(seed)
        report = report_of(plan)
        lines = [each for each in memory_tables.memory_tables(report) if isinstance(each, str)]
        wrong = plan.model_copy(update={"memory": plan.memory[:1]})
        assert report_of(wrong).gpus[1:] == tuple(
            room.model_copy(update={"plan_peak_bytes": None}) for room in report.gpus[1:]
        )
        for row, room, memory in zip(plan.memory, report.gpus, report.predicted, strict=True):
            more = row.peak_bytes > memory.peak.size
            assert room.plan_peak_bytes == (row.peak_bytes if more else None)
            start = f"{room.name}: the plan's peak is {format_bytes(row.peak_bytes)}, because"
            assert any(line.startswith(start) for line in lines) == more
            told += more
    assert told > 2


def test_a_picture_stacks_all_terms(tmp_path: Path) -> None:
    """One row per GPU, the measured step beside the period; the stack is as high as the peak."""
    plan = handmade_offload.two_gpus()
    figure = memory_picture.terms_figure(measured(plan))
    assert len(figure.axes) == 4
    for axes, row in zip(figure.axes[::2], plan.memory, strict=True):
        top = max(
            float(path.vertices[:, 1].max())
            for part in axes.collections
            for path in part.get_paths()
        )
        assert top == row.peak_bytes
    for ending in ("png", "svg"):
        memory_picture.draw_terms(report_of(plan), tmp_path / f"memory.{ending}")
        assert (tmp_path / f"memory.{ending}").stat().st_size > 1000


def test_show_gives_tables_files_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one plan; files that exist are not replaced."""
    plan = tmp_path / "plan.json"
    plan.write_text(handmade_offload.two_gpus().to_json())
    files = ["--csv", str(tmp_path / "m.csv"), "--memory-picture", str(tmp_path / "m.svg")]
    assert main(["show", str(plan), *files]) == 0
    assert "terms at the peak, stage by stage" in capsys.readouterr().out
    assert (tmp_path / "m.csv").read_text() == as_csv(report_of(handmade_offload.two_gpus()))
    assert main(["show", str(plan), *files]) == 2
    assert "exists already" in capsys.readouterr().err
    for more in ([], ["--json"]):
        assert main(["show", str(plan), "--csv", "-", *more]) == 0
        assert capsys.readouterr().out == (tmp_path / "m.csv").read_text()
    assert main(["show", str(plan), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["memory_report"]
    assert MemoryReport.from_data(told) == report_of(handmade_offload.two_gpus())


def test_a_plan_that_cannot_be_replayed_has_no_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is shown without; files are refused with the next step."""
    broken = two_stages()
    broken = broken.model_copy(update={"ops": broken.ops[1:]})
    assert planned_memory(broken) is None
    plan = tmp_path / "plan.json"
    plan.write_text(broken.to_json())
    assert main(["show", str(plan)]) == 0
    assert "stage by stage" not in capsys.readouterr().out
    assert main(["show", str(plan), "--csv", str(tmp_path / "m.csv")]) == 2
    assert "pipeplan verify" in capsys.readouterr().err


def test_report_shows_the_run_beside_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tables, JSON rows with errors, CSV; a folder without memory.json has none of it."""
    run = write_run(tmp_path / "run", instrumented=False)
    assert main(["report", str(run)]) == 0
    assert "stage by stage" not in capsys.readouterr().out
    assert main(["report", str(run), "--csv", str(tmp_path / "no.csv")]) == 2
    assert "memory.json" in capsys.readouterr().err
    (run / FILE).write_text(measured(TWO, 8).to_json())
    assert main(["report", str(run), "--csv", str(tmp_path / "m.csv")]) == 0
    out = capsys.readouterr().out
    assert "memory per GPU, measured in step 2" in out
    assert (tmp_path / "m.csv").read_text() == as_csv(measured(TWO, 8))
    assert main(["report", str(run), "--json"]) == 0
    rows = [row for row in json.loads(capsys.readouterr().out) if "term" in row]
    assert {row["error"] for row in rows if row["term"] != "other"} == {0.0}
    assert [row["error"] for row in rows if row["term"] == "other"] == [None]
    held = sum(row["measured"] for row in rows if row["rank"] == 0)
    assert held == TWO.memory[0].peak_bytes + 8


def test_a_run_that_counted_nothing_shows_its_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As of compiled layers, or with --no-sample; a rank of several may have counted nothing."""
    run = write_run(tmp_path / "run", instrumented=False)
    (run / FILE).write_text(report_of(TWO).to_json())
    assert main(["report", str(run)]) == 0
    assert "of peak" in capsys.readouterr().out
    made = report_of(TWO)
    half = with_measured(made, [(2, made.predicted[0]), None], [7, None])
    assert next(line.count(" - ") for line in printed(half) if "gpu1 " in line) >= 2
    assert any("took 7 B" in line for line in printed(half))


def test_numbers_that_do_not_fit_are_refused() -> None:
    """A file of another number of GPUs, or of stages that are not there, is bad input."""
    data = json.loads(measured(TWO).to_json())
    for change, word in (
        ({"measured": data["measured"][:1]}, "measured: got 1 GPUs, need 2"),
        ({"predicted": []}, "predicted: got 0 GPUs, need 2"),
        ({"stages": data["stages"][:1]}, "got a term of stage 1, need one below 1"),
        ({"stages": [data["stages"][0] | {"gpu": 2}, data["stages"][1]]}, r"stages\[0\].gpu"),
    ):
        with pytest.raises(InputError, match=word):
            MemoryReport.from_data(data | change)
    memory = data["predicted"][0]
    torn = memory | {"curve": memory["curve"] | {"times_ns": [0]}}
    with pytest.raises(InputError, match="one per time"):
        MemoryReport.from_data(data | {"predicted": [torn, data["predicted"][1]]})
