"""`launch --clock sleep|virtual`: a plan without a task runs, in its time, and is reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeplan import lowering
from pipeplan.errors import InputError
from pipeplan.launch import options
from pipeplan.launch.__main__ import main
from pipeplan.plan import Plan
from pipeplan.report import run as report
from pipeplan.simulator import simulate
from pipeplan.testing import plans


def write(folder: Path) -> tuple[Plan, Path]:
    """A plan for one GPU whose chain no task was profiled for."""
    plan = plans.random_plan(5, gpus=1, layers=4)
    file = folder / "plan.json"
    file.write_text(plan.to_json())
    return plan, file


def ran(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """What `--json` prints."""
    _, file = write(folder)
    assert main(["--plan", str(file), "--steps", "3", "--json", *words]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)
    return told


def test_virtual_time_is_the_simulators(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three steps take as long as the simulator's eager clock says, in its own nanoseconds."""
    told = ran(tmp_path, capsys, "--clock", "virtual", "--out", str(tmp_path / "run"))
    plan, _ = write(tmp_path)
    count = 3 * plan.microbatches
    simulated = simulate(
        plan, lowering.lower(plan), microbatches=count, clock="eager", updates=True
    )
    assert told["measured"]["elapsed_ns"] == simulated.makespan_ns
    assert json.loads((tmp_path / "run" / "run.json").read_text()) == told
    rows = report.comparisons([report.read(tmp_path / "run")])
    assert rows[-1].predicted == plan.step_ns


def test_sleeping_takes_the_planned_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With times stretched to milliseconds a dry run really lasts at least as long."""
    virtual = ran(tmp_path, capsys, "--clock", "virtual")["measured"]["elapsed_ns"]
    told = ran(tmp_path, capsys, "--clock", "sleep", "--time-scale", "50000")
    assert told["time_scale"] == 50000
    assert told["measured"]["elapsed_ns"] >= 50000 * virtual


def test_people_are_told_planned_beside_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without `--json` the period and the step stand beside the planned ones on stderr."""
    _, file = write(tmp_path)
    assert main(["--plan", str(file), "--steps", "3", "--clock", "virtual"]) == 0
    assert capsys.readouterr().err.count("(planned ") == 2


def test_dry_run_needs_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table of ranks, with the layer names of the chain."""
    _, file = write(tmp_path)
    assert main(["--plan", str(file), "--clock", "virtual", "--dry-run"]) == 0
    assert "l0 .. " in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ("--time-scale", "2"),
        ("--time-scale", "0", "--clock", "sleep"),
        ("--clock", "virtual", "--resume", "run"),
        ("--clock", "sleep", "--instrument"),
        ("--clock", "lamport"),
    ],
)
def test_what_makes_no_sense_is_refused(words: tuple[str, ...]) -> None:
    """Flags of a training, a scale of nothing and unknown clocks: one message each."""
    with pytest.raises(InputError, match="launch: "):
        options.parse(["--plan", "plan.json", *words])
