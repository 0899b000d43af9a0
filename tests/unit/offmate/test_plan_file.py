"""The file of a plan of states on the host, and the command that writes it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch

from pipeplan import schemas
from pipeplan.cli import remat_states
from pipeplan.cli.entry import main
from pipeplan.errors import InputError
from pipeplan.offmate import StateTraining
from pipeplan.remat.states import StatePlan, plan_states
from pipeplan.remat.states.plan_file import StatePlanFile
from pipeplan.task import Task
from tests.offmate import G, step_of_training
from tests.offmate_tasks import perceptrons

REMAT = (
    "remat", "tests.offmate_tasks:momentum", "--offload", "states", "--budget", "40KiB",
    "--host-memory", "1MB", "--host-bandwidth", "1GB/s",
)  # fmt: skip


@pytest.fixture(scope="module")
def plan() -> StatePlan:
    """Of a given problem: no task is measured."""
    return plan_states(step_of_training(host=200), 20)


def test_what_is_read_is_what_was_written(plan: StatePlan) -> None:
    """The same program, placement, options and judgement; the schema allows the file."""
    text = StatePlanFile.of(plan, "a:task", "0" * 64).to_json()
    jsonschema.validate(json.loads(text), schemas.load("states"))
    file = StatePlanFile.from_json(text)
    assert file.to_json() == text
    found = file.plan()
    assert found.problem == plan.problem
    assert (found.program, found.placement) == (plan.program, plan.placement)
    assert (found.outcome, found.option_names) == (plan.outcome, plan.option_names)
    assert found.host_bytes == plan.host_bytes


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": [0]}, "program: the begin"),
        ({"host": [10**6]}, "got storage 1000000"),
        ({"program": "pipeplan-device-program/1\nrun 0\n"}, "program: "),
        ({"program": "run 0\n"}, "program, line 1"),
        ({"states_per_value": "2"}, "states_per_value"),
    ],
)
def test_what_means_nothing_is_refused(
    plan: StatePlan, changes: dict[str, Any], words: str
) -> None:
    """With the place, in one line."""
    data = json.loads(StatePlanFile.of(plan).to_json()) | changes
    with pytest.raises(InputError, match=words):
        StatePlanFile.from_data(data).plan()


def test_a_plan_over_its_own_budget_is_refused(plan: StatePlan) -> None:
    """The judge reads the file's limits."""
    data = json.loads(StatePlanFile.of(plan).to_json())
    data["machine"]["device_bytes"] = plan.outcome.peak_bytes - G
    with pytest.raises(InputError, match="need at most"):
        StatePlanFile.from_data(data).plan()


def test_the_command_writes_a_plan_that_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Within its limits, with the bytes that it printed; a task of another batch is refused."""
    path = tmp_path / "states.json"
    assert main([*REMAT, "-o", str(path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    task = perceptrons("momentum")
    torch.manual_seed(0)
    with StateTraining.of_file(task, path) as training:
        figures = [training.step(number) for number in range(2)][-1]
    assert figures.device_peak_bytes == said["peak_bytes"] <= said["budget_bytes"] == 40 * 1024
    assert figures.host_peak_bytes == said["host_peak_bytes"] <= said["host_bytes"]
    assert training.room.bytes == said["host_bytes"] <= said["host_limit_bytes"]

    def data(number: int) -> Any:
        source, target = task.data(number)
        return source[:4], target[:4]

    other: Task = replace(perceptrons("momentum"), data=data)
    with pytest.raises(InputError, match="task_digest"):
        StateTraining.of_file(other, path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"step": 150, "bound": 100.0, "compute": 50},
            "150 ns, 300.0% .* bound 100 ns, gap 50.0%",
        ),
        ({"step": 0, "bound": 0.0, "compute": 0}, r"0 ns, \? of .* bound 0 ns, gap \?"),
    ],
)
def test_the_gap_is_over_the_bound(
    changes: dict[str, Any],
    said: str,
    plan: StatePlan,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As everywhere else; where nothing is computed or proven there is none."""
    monkeypatch.setitem(plan.problem.__dict__, "compute_ns", changes["compute"])
    remat_states._present(
        replace(
            plan,
            relaxation=replace(plan.relaxation, bound_ns=changes["bound"]),
            outcome=replace(plan.outcome, makespan_ns=changes["step"]),
        )
    )
    assert re.search(said, capsys.readouterr().out)


def test_the_command_takes_a_way_of_one_direction(tmp_path: Path) -> None:
    """The file says so, and the judge of the file has one way, too."""
    path = tmp_path / "states.json"
    assert main([*REMAT, "--host-duplex", "half", "-o", str(path)]) == 0
    found = StatePlanFile.from_json(path.read_text()).plan()
    assert found.problem.machine.duplex is False
    assert found.outcome.violations == ()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (REMAT[:-2], "--host-bandwidth: got none"),
        ((*REMAT, "--method", "rotor"), "--method: got rotor"),
        ((*REMAT, "--slots", "9"), "--slots: got it with --offload states"),
        (("remat", "c.json", "--budget", "1MB", "--host-memory", "1MB"), "got no --offload"),
    ],
)
def test_flags_that_mean_nothing_are_refused(
    arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By name."""
    assert main(list(arguments)) == 2
    assert words in " ".join(capsys.readouterr().err.split())
