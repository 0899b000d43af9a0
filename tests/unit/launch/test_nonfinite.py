"""Losses, norms and weights that are not finite: the run stops, and files stay what they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeplan.cli import main
from pipeplan.launch import __main__ as launch
from pipeplan.plan import Semantics
from pipeplan.runtime.checkpoint import storage
from tests import launch_task


def run(folder: Path, semantics: Semantics, task: str, *words: str, waits: bool = False) -> int:
    """A launch of four steps of `task` on one rank, into `folder`/run; its exit code."""
    plan = launch_task.plan(1, semantics)
    file = folder / "plan.json"
    file.write_text((launch_task.waiting(plan) if waits else plan).to_json())
    given = ["--plan", str(file), "--task", f"tests.launch_task:{task}", "--steps", "4"]
    return launch.main([*given, "--save-every", "1", "--out", str(folder / "run"), *words])


def saved(folder: Path) -> list[int]:
    """Steps of the complete checkpoints."""
    paths = storage.folders(folder / "run")
    return [storage.read_meta(path).step for path in paths if storage.is_complete(path)]


def strict(text: str) -> Any:
    """`text` as JSON, which has no NaN."""
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"got {word}"))


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
@pytest.mark.parametrize(
    ("task", "message", "steps"),
    [
        ("spoiled(at=14)", "step 3: the loss of micro-batch 14 (stage 1) is not finite.", [1, 2]),
        (
            "steep(clip_norm=1.0)",
            "step 1: the norm of the gradient of '0.0.weight' (stage 0) is",
            [],
        ),
        ("steep()", "step 1: the weight '0.0.weight' (stage 0) is not finite.", []),
    ],
)
def test_a_run_stops_at_the_first(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    task: str,
    message: str,
    steps: list[int],
    semantics: Semantics,
) -> None:
    """One message names step and stage; no checkpoint holds what followed."""
    assert run(tmp_path, semantics, task, waits="clip" in task) == 1
    said = capfd.readouterr().err
    assert said.count("error: ") == 1, said
    assert f"error: {message}" in said
    assert ("--resume" in said) == bool(steps)
    assert saved(tmp_path) == steps
    assert not (tmp_path / "run" / "model.pt").exists()
    assert not (tmp_path / "run" / "run.json").exists()


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
@pytest.mark.parametrize("task", ["spoiled(at=14)", "spoiled(at=0)"])
def test_a_user_may_train_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], task: str, semantics: Semantics
) -> None:
    """All steps are made and saved, every file is JSON, and `report` reads the run's own."""
    assert run(tmp_path, semantics, task, "--allow-nonfinite", "--json") == 0
    out = tmp_path / "run"
    assert saved(tmp_path) == [1, 2, 3, 4]
    lines = (out / "metrics.jsonl").read_text().splitlines()
    spoiled = 14 if "14" in task else 0
    known = [strict(line)["loss"] is not None for line in lines]
    assert known == [spoiled > 6 * step + 5 for step in range(4)]
    assert [strict(line) for line in capfd.readouterr().out.splitlines()] == list(
        map(strict, lines)
    )
    assert strict((out / "run.json").read_text())["measured"]["last_loss"] is None
    assert any(value.isnan().any() for value in torch.load(out / "model.pt").values())
    assert main(["report", str(out)]) == 0
    capfd.readouterr()
    assert main(["report", str(out), "--json"]) == 0
    strict(capfd.readouterr().out)


def test_steps_that_loss_scaling_skips_are_legal(tmp_path: Path) -> None:
    """Gradients that are not finite are what the scale is for: nothing stops."""
    assert run(tmp_path, "flush", "steep(scaled=True)", waits=True) == 0
    assert saved(tmp_path) == [1, 2, 3, 4]


def test_a_dry_run_has_no_numbers(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The flag means nothing without a model, and is refused."""
    file = tmp_path / "plan.json"
    file.write_text(launch_task.plan(1, "flush").to_json())
    assert launch.main(["--plan", str(file), "--clock", "virtual", "--allow-nonfinite"]) == 2
    assert "got --allow-nonfinite with --clock virtual" in capfd.readouterr().err
