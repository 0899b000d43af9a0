"""Data parallel x pipeline: P x D ranks equal one process that averages over D replicas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pipeplan.capture import profile
from pipeplan.plan import Semantics
from tests import launch_task
from tests.distributed.launches import STEPS, launched, place, spec


def side_by_side(
    folder: Path, gpus: int, replicas: int, semantics: Semantics, *words: str
) -> dict[str, object]:
    """A launch of `replicas` pipelines of `gpus` ranks."""
    plan = launch_task.plan(gpus, semantics)
    made = spec(folder, plan, "--replicas", str(replicas), *words)
    return made | {"ranks": gpus * replicas}


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_two_replicas_then_three_then_one(tmp_path: Path, semantics: Semantics) -> None:
    """2 steps on 2 x 2 ranks, 1 on 1 x 3, 1 on 2 x 1, each resumed: bit-equal, data in order."""
    out = tmp_path / "run"
    again = ("--resume", str(out))
    validates = ("--task", "tests.launch_task:validated", "--validate-every", "2")
    told = launched(
        side_by_side(tmp_path, 2, 2, semantics, "--steps", "2", *validates),
        side_by_side(tmp_path, 1, 3, semantics, "--steps", "3", *again),
        side_by_side(tmp_path, 2, 1, semantics, "--steps", "4", *again),
    )
    assert [each["code"] for run in told for each in run] == [0] * 9, told
    expected = launch_task.trained(semantics, 4, replicas=(2, 2, 3, 1))
    state = torch.load(out / "model.pt")
    assert state.keys() == expected.weights.keys()
    assert all(torch.equal(state[name], expected.weights[name]) for name in state)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    m = launch_task.MICROBATCHES
    means = [sum(expected.losses[i : i + m]) / m for i in range(0, 4 * m, m)]
    assert [line["loss"] for line in lines] == means
    assert [line["gradient_norm"] for line in lines] == expected.norms
    (told_of,) = (out / "validation.jsonl").read_text().splitlines()
    count = launch_task.VALIDATED
    first = launch_task.trained(semantics, 2, replicas=(2, 2), evaluate=count).evaluated
    assert json.loads(told_of)["loss"] == sum(first) / count


def test_replicas_of_a_step_plan_with_split_backwards(tmp_path: Path) -> None:
    """A stage's average begins behind its last W: 2 x 2 ranks, then 1 x 3, equal one process."""
    out = tmp_path / "run"
    plans = {gpus: launch_task.step_plan(gpus) for gpus in (1, 2)}
    for plan in plans.values():
        assert plan.k == plan.microbatches == launch_task.MICROBATCHES
        assert [stage.split_backward for stage in plan.stages].count(False) == 1
    made = spec(tmp_path, plans[2], "--replicas", "2", "--steps", "2") | {"ranks": 4}
    again = spec(tmp_path, plans[1], "--replicas", "3", "--steps", "3", "--resume", str(out)) | {
        "ranks": 3
    }
    told = launched(made, again)
    assert [each["code"] for run in told for each in run] == [0] * 7, told
    expected = launch_task.trained("flush", 3, replicas=(2, 2, 3))
    state = torch.load(out / "model.pt")
    assert state.keys() == expected.weights.keys()
    assert all(torch.equal(state[name], expected.weights[name]) for name in state)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    m = launch_task.MICROBATCHES
    means = [sum(expected.losses[i : i + m]) / m for i in range(0, 3 * m, m)]
    assert [line["loss"] for line in lines] == means


def test_the_averaged_gradient_is_clipped(tmp_path: Path) -> None:
    """The global norm is that of the mean over the replicas: bit-equal to one process."""
    made = side_by_side(tmp_path, 2, 2, "2bw", "--task", "tests.launch_task:clipped")
    plan = launch_task.waiting(launch_task.plan(2, "2bw"))
    (tmp_path / "plan2.json").write_text(plan.to_json())
    (told,) = launched(made)
    assert [each["code"] for each in told] == [0] * 4, told
    expected = launch_task.trained("2bw", STEPS, 0, [2] * STEPS, launch_task.clipped)
    assert max(expected.norms) > 0.5
    state = torch.load(tmp_path / "run" / "model.pt")
    assert all(torch.equal(state[name], value) for name, value in expected.weights.items())


def test_replicas_of_nested_data(tmp_path: Path) -> None:
    """Dicts of inputs, outputs and targets, a share of each to each replica: bit-equal."""
    task = "tests.launch_task:nested"
    chain = launch_task.leveled(profile(task, repeats=1, warmup=0))
    plan = launch_task.plan_of(chain, 2, "2bw")
    words = ("--task", task, "--replicas", "2")
    (told,) = launched(spec(tmp_path, plan, *words) | {"ranks": 4})
    assert [each["code"] for each in told] == [0] * 4, told
    expected = launch_task.trained("2bw", STEPS, 0, [2] * STEPS, launch_task.nested).weights
    state = torch.load(tmp_path / "run" / "model.pt")
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_a_killed_rank_stops_all_replicas(tmp_path: Path) -> None:
    """Rank 3 (replica 1, GPU 1) dies: all others stop, none waits; the restarted run is exact."""
    plan = launch_task.plan(2, "2bw")
    words = ("--save-every", "2")
    fault = {"rank": 3, "does": "kill", "at": place(plan, 1, "steady")}
    told, again = launched(
        side_by_side(tmp_path, 2, 2, "2bw", *words) | {"fault": fault},
        side_by_side(tmp_path, 2, 2, "2bw", *words) | {"attempt": 1},
    )
    assert [each["code"] for each in told] == [1, 1, 1, -9], told
    assert "error: replica 1: rank 0: " in told[2]["said"], told
    assert "replica 1" in told[1]["said"], told
    assert [each["code"] for each in again] == [0] * 4, again
    state = torch.load(tmp_path / "run" / "model.pt")
    expected = launch_task.trained("2bw", STEPS, replicas=[2] * STEPS).weights
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["first_step"] == 2
