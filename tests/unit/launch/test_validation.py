"""`launch` validates between steps, keeps the best checkpoint, and tells who follows the run."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeplan.errors import InputError
from pipeplan.launch import __main__ as launch
from pipeplan.launch import ending
from pipeplan.launch.best import BestSoFar
from pipeplan.launch.logs import json_line
from pipeplan.plan import Semantics
from pipeplan.runtime.checkpoint import storage
from pipeplan.validation import BestRule, Validation
from tests import launch_task

TASK = "tests.launch_task:validated"


def run(out: Path, steps: int, *words: str, semantics: Semantics = "flush") -> int:
    """A launch up to `steps` on one rank, validating every second step."""
    plan = out.parent / f"{semantics}.json"
    plan.write_text(launch_task.plan(1, semantics).to_json())
    given = ["--plan", str(plan), "--task", TASK, "--steps", str(steps), *words]
    place = [] if "--resume" in words else ["--out", str(out)]
    return launch.main([*given, *place, "--validate-every", "2"])


def lines(text: str) -> list[dict[str, Any]]:
    """Each line as JSON."""
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_training_goes_on_as_if_nobody_validated(
    tmp_path: Path, semantics: Semantics, capfd: pytest.CaptureFixture[str]
) -> None:
    """Weights and losses of one process that never validates; values of its newest weights.

    What stdout tells is what callbacks and files are told.
    """
    out = tmp_path / "run"
    launch_task.Told.events.clear()
    words = "--keep", "1", "--keep-best", "accuracy:max", "--log-format", "json"
    assert run(out, 5, *words, semantics=semantics) == 0
    told = lines(capfd.readouterr().out)
    expected = launch_task.trained(semantics, 5)
    state = torch.load(out / "model.pt")
    assert all(torch.equal(state[name], value) for name, value in expected.weights.items())
    validations = lines((out / "validation.jsonl").read_text())
    assert [each["step"] for each in validations] == [2, 4, 5]
    losses = launch_task.validation_losses(semantics, 2, 4, 5)
    assert [each["loss"] for each in validations] == losses
    steps = lines((out / "metrics.jsonl").read_text())
    assert [each["gradient_norm"] for each in steps] == expected.norms
    assert [each for each in told if each["event"] == "validation"] == [
        {"event": "validation", **each} for each in validations
    ]
    assert [each for each in told if each["event"] == "step"] == [
        {"event": "step", **each} for each in steps
    ]
    events = [(each["event"], each.get("step", 0)) for each in told]
    assert events == launch_task.Told.events
    assert events[0] == ("start", 0)
    assert events[-1] == ("end", 5)
    best = max(validations, key=lambda each: each["metrics"]["accuracy"])["step"]
    assert max(each["step"] for each in validations if each["best"]) == best
    found = [storage.read_meta(each).step for each in storage.folders(out)]
    assert found == sorted({best, 5}), "the best stays beside the newest one"
    state = torch.load(out / "best.pt")
    weights = launch_task.trained(semantics, best).weights
    assert all(torch.equal(state[name], value) for name, value in weights.items())


def test_the_best_value_survives_a_kill(tmp_path: Path) -> None:
    """A resumed run compares with what was validated before, torn and undone steps left out."""
    out = tmp_path / "run"
    assert run(out, 4, "--keep-best", "loss", "--save-every", "2") == 0
    file = out / "validation.jsonl"
    first, last = lines(file.read_text())
    first["loss"], last["loss"] = -1.0, -2.0
    file.write_text(json_line(first) + "\n" + json_line(last) + "\n" + '{"step": 5, "lo')
    shutil.rmtree(storage.step_folder(out, 4))
    assert run(out, 6, "--resume", str(out), "--keep-best", "loss") == 0
    told = json.loads((out / "run.json").read_text())["best"]
    assert told == {
        "metric": "loss",
        "value": -1.0,
        "checkpoint": str(storage.step_folder(out, 2)),
    }
    assert [each["step"] for each in lines(file.read_text())] == [2, 4, 6]
    assert [each["best"] for each in lines(file.read_text())] == [True, False, False]


@pytest.mark.parametrize(
    ("value", "highest", "better"),
    [(0.5, False, False), (0.3, False, True), (0.5, True, True), (float("nan"), True, False)],
)
def test_better(value: float, highest: bool, better: bool) -> None:
    """Lower or higher than the best so far; never what is no number."""
    best = BestSoFar(BestRule("x", highest), 0.4, Path("a"))
    assert best.offer({"x": value}, Path("b")) == better
    assert best.path == Path("b" if better else "a")


@pytest.mark.parametrize(
    ("fails", "said"),
    [
        ("metric", "validation: metric 'accuracy' failed: KeyError: 'no such class'"),
        ("data", "validation: task.data(0): got input"),
        ("step", "task: callback Told.step failed at step 1: ValueError: full"),
        ("validation", "task: callback Told.validation failed at step 2: ValueError: full"),
    ],
)
def test_what_fails_is_named(
    tmp_path: Path,
    fails: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A metric or data that cannot work before the first step, a callback at its step."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(ending, "os", SimpleNamespace(_exit=leave))
    monkeypatch.setattr(ending.signal, "signal", lambda *_: None)
    out = tmp_path / "run"
    with pytest.raises(SystemExit) as ended:
        run(out, 2, "--task", f"{TASK}(fails={fails!r})")
    assert ended.value.code == 2
    err = capfd.readouterr().err
    assert said in err
    assert ("step 1/2" in err) == (fails in ("step", "validation"))


def test_tensorboard_gets_all_scalars(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Those of metrics.jsonl and validation.jsonl; without the package one line says so."""
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert run(tmp_path / "none", 2, "--tensorboard") == 2
    assert "pip install tensorboard" in capfd.readouterr().err
    written: list[tuple[str, float, int]] = []

    class Writer:
        def __init__(self, folder: str, purge_step: int) -> None:
            assert (folder, purge_step) == (str(tmp_path / "run" / "tensorboard"), 1)

        def add_scalar(self, name: str, value: float, step: int) -> None:
            written.append((name, value, step))

        def close(self) -> None:
            written.append(("closed", 0, 0))

    module = SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    assert run(tmp_path / "run", 2, "--tensorboard") == 0
    found = {(name, step): value for name, value, step in written}
    assert written[-1][0] == "closed"
    for step in lines((tmp_path / "run" / "metrics.jsonl").read_text()):
        assert found["train/loss", step["step"]] == step["loss"]
        assert found["train/gradient_norm", step["step"]] == step["gradient_norm"]
        assert found["train/learning_rate", step["step"]] == 0.01
    (validation,) = lines((tmp_path / "run" / "validation.jsonl").read_text())
    assert found["validation/loss", 2] == validation["loss"]
    assert found["validation/accuracy", 2] == validation["metrics"]["accuracy"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"microbatches": 0}, "got 0, need at least 1"),
        ({"microbatches": 2.0}, "got 2.0, need an integer"),
        ({"metrics": {"loss": abs}}, "got the name 'loss'"),
        ({"metrics": {"x": 3}}, "metric 'x': got a int, need a function"),
    ],
)
def test_what_is_no_validation(fields: dict[str, Any], said: str) -> None:
    """Refused where it is made, by the field."""
    with pytest.raises(InputError, match=said):
        Validation(**{"data": launch_task.pipelines.data, "microbatches": 1} | fields)
