"""`pipeplan profile`: modes, devices, stages; flags that would mean nothing are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeplan.chain import Chain
from pipeplan.cli import main
from pipeplan.devices import DeviceTable, find_device
from pipeplan.stage_profile import StageProfile

TASK = """
import torch
from torch import nn
from pipeplan.task import Task, task_function

@task_function
def task(seed=0):
    return Task(
        model=nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 1)),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=lambda microbatch: (torch.ones(8, 64), torch.ones(8, 1)),
    )
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a task, and we are in it."""
    (tmp_path / "own.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_fake_mode_estimates(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The chain says that its times are estimates and for what; so does the command."""
    words = ["profile", "own.py:task", "--mode", "fake", "--device", "h100", "-o", "chain.json"]
    assert main(words) == 0
    chain = Chain.read(folder / "chain.json")
    assert (chain.mode, chain.device["device"]) == ("estimated", "h100")
    told = capsys.readouterr().err
    assert "times are estimates for h100" in told
    assert "@pipeplan.task_function" not in told


def test_a_task_that_no_plan_may_name_is_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not the launch alone: then the plan is made already."""
    (folder / "unmarked.py").write_text(TASK.replace("@task_function\n", ""))
    assert main(["profile", "unmarked.py:task", "--mode", "fake", "-o", "chain.json"]) == 0
    told = capsys.readouterr().err
    assert "mark the function with @pipeplan.task_function" in told
    assert "launch --task unmarked.py:task" in told


RECURRENT = """
import torch
from torch import nn
from pipeplan.task import Task, task_function

class Read(nn.Module):
    def __init__(self):
        super().__init__()
        self.before, self.own, self.last = nn.Linear(64, 64), nn.GRU(64, 64), nn.Linear(64, 1)

    def forward(self, rows):
        read, _ = self.own(self.before(rows))
        return self.last(read)

@task_function
def task(seed=0):
    return Task(
        model=Read(),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=lambda microbatch: (torch.ones(8, 4, 64), torch.ones(8, 4, 1)),
    )
"""


def test_recurrent_modules_are_exported_without_a_warning(
    folder: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Of torch's, which says that they store their weights anew in every forward."""
    (folder / "recurrent.py").write_text(RECURRENT)
    assert main(["profile", "recurrent.py:task", "--mode", "fake", "-o", "chain.json"]) == 0
    assert not any("were assigned during export" in str(each.message) for each in recwarn)


NARROW = """
import torch
from torch import nn
from pipeplan.task import Task, task_function

class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))

    def forward(self, value):
        for _ in range(3):
            value = torch.tanh(value * self.scale)
        return value

@task_function
def task(seed=0):
    return Task(
        model=nn.Sequential(Sums(), nn.Linear(64, 64), Sums(), nn.Linear(64, 1)),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=lambda microbatch: (torch.ones(8, 64), torch.ones(8, 1)),
    )
"""


def test_programs_over_operators_are_found(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measured and estimated options have the same bytes; what happens is told."""
    (folder / "narrow.py").write_text(NARROW)
    words = ["profile", "narrow.py:task", "--options", "--time-limit", "20s"]
    assert main([*words, "--repeats", "1", "--warmup", "0", "-o", "a.json"]) == 0
    assert "operators, " in capsys.readouterr().err
    assert main([*words, "--mode", "fake", "--device", "cpu", "-o", "b.json"]) == 0
    chains = [Chain.read(folder / name) for name in ("a.json", "b.json")]
    kept = []
    for chain in chains:
        least = [min((o.saved_bytes for o in x.options), default=None) for x in chain.layers]
        assert least[0] is not None
        kept.append(least)
        assert min(kept[-1][0], chain.layers[0].saved_bytes) < chain.layers[0].saved_bytes
    assert kept[0] == kept[1]


def test_the_usual_device_is_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No device given is no silent choice; a table of one device is a choice."""
    assert main(["profile", "own.py:task", "--mode", "fake", "-o", "a.json"]) == 0
    assert "times are estimates for a100" in capsys.readouterr().err
    table = DeviceTable(devices=(find_device("cpu").model_copy(update={"name": "mine"}),))
    (folder / "devices.json").write_text(table.to_json())
    words = ["profile", "own.py:task", "--mode", "fake", "--device-table", "devices.json"]
    assert main([*words, "-o", "b.json"]) == 0
    assert Chain.read(folder / "b.json").device["device"] == "mine"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["own.py:task", "--device", "h100"], "--device: is for estimating, need --mode fake"),
        (["own.py:task", "--device-table", "x"], "--device-table: is for estimating"),
        (["own.py:task", "--mode", "fake", "--repeats", "3"], "--repeats: is for measuring"),
        (["own.py:task", "--mode", "fake", "--device", "b9"], "device: got 'b9', need one of"),
        (["--stages", "plan.json", "--companions", "1"], "--stages: stages are measured alone"),
        (["--mode", "fake"], "got no TASK"),
        (["--stages", "plan.json", "--options"], "--options: is for the layers of a task"),
        (["own.py:task", "--time-limit", "9s"], "--time-limit: is for --options"),
    ],
)
def test_flags_that_mean_nothing_are_refused(
    folder: Path, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is one line and exit code 2; no file is written."""
    assert main(["profile", *flags, "-o", "chain.json"]) == 2
    assert message in capsys.readouterr().err
    assert not (folder / "chain.json").exists()


def test_stages_of_a_plan_are_measured_and_used(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """profile, plan, profile --stages, plan --refine: the second plan has the stages' times.

    The stages are pinned, one layer and three: measured times of so small layers are any.
    """
    quick = ["--repeats", "2", "--warmup", "0"]
    assert main(["profile", "own.py:task", *quick, "-o", "chain.json"]) == 0
    machines = ["--gpus", "2", "--memory", "1MiB", "--bandwidth", "inf", "--time-limit", "2s"]
    machines += ["--pin", "0=0,1..3=1"]
    assert main(["plan", "chain.json", *machines, "-o", "plan.json"]) == 0
    capsys.readouterr()
    assert main(["profile", "--stages", "plan.json", *quick, "-o", "stages.json"]) == 0
    shown = capsys.readouterr().out
    found = StageProfile.read(folder / "stages.json")
    for stage in found.stages:
        first, last = stage.layers
        name = f"layer {first}" if first == last else f"layers {first}-{last}"
        assert f"{name}: backward peak" in shown
    assert [stage.layers for stage in found.stages] == [(0, 0), (1, 3)]
    assert found.task == "own.py:task"
    words = ["plan", "chain.json", "--refine", "stages.json", *machines, "-o", "refined.json"]
    assert main(words) == 0
    chain = json.loads((folder / "refined.json").read_text())["chain"]
    assert chain["device"]["refined_by"] == found.digest()
    first = found.stages[0]
    inside = chain["layers"][first.layers[0] : first.layers[1] + 1]
    assert sum(layer["forward_ns"] for layer in inside) == first.forward_ns


def test_a_plan_without_a_task_needs_one(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stages of an imported chain's plan belong to no model that could be run."""
    from tests.samples import two_stages

    (folder / "plan.json").write_text(two_stages().to_json())
    assert main(["profile", "--stages", "plan.json", "-o", "stages.json"]) == 2
    assert "names no task" in capsys.readouterr().err
