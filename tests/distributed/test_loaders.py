"""A `DataLoader` with workers feeds ranks that update without a drain."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import torch

from tests import launch_task, loader_task
from tests.distributed import launches


def test_workers_feed_2bw_that_is_killed_and_goes_on(tmp_path: Path) -> None:
    """Two ranks, two workers each, one rank killed amid a step, resumed from a checkpoint.

    Weights and losses are those of one process that iterates over the same loader, in every bit.
    """
    plan = launch_task.plan(2, "2bw")
    words = ("--task", loader_task.REFERENCE, "--save-every", "2")
    kill = {"rank": 1, "does": "kill", "at": launches.place(plan, 1, "steady")}
    out = tmp_path / "run"
    first, second = launches.launched(
        launches.spec(tmp_path, plan, *words, fault=kill),
        launches.spec(tmp_path, plan, *words, "--resume", str(out), attempt=1),
    )
    assert all(rank["code"] != 0 for rank in first), first
    assert all(rank["code"] == 0 for rank in second), second
    assert 0 < json.loads((out / "run.json").read_text())["first_step"] < launches.STEPS
    m = launch_task.MICROBATCHES
    make = functools.partial(loader_task.plain, count=launches.STEPS * m)
    alone = launch_task.trained("2bw", launches.STEPS, make=make)
    state = torch.load(out / "model.pt")
    assert state.keys() == alone.weights.keys()
    assert all(torch.equal(state[name], value) for name, value in alone.weights.items())
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    means = [sum(alone.losses[s * m : (s + 1) * m]) / m for s in range(launches.STEPS)]
    assert [line["loss"] for line in lines] == means
