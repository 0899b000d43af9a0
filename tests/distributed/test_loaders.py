"""A `DataLoader` with workers feeds ranks that update without a drain, also while they stop."""

from __future__ import annotations

import functools
import json
import signal
import time
from pathlib import Path

import pytest
import torch

from tests import case_scripts, forked_commands, launch_task, loader_task
from tests.distributed import launches, worker_cases


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


WORKER_CASES = Path(worker_cases.__file__)


@pytest.mark.parametrize(("does", "starts"), [("goes-on", "fork"), ("of-a-file", "forkserver")])
def test_workers_outlast_a_signal_to_their_group(does: str, starts: str) -> None:
    """Torchrun forwards SIGTERM to the whole group of a rank, which then loads on and saves.

    Workers that are not forked find the classes of a task file.
    """
    told = case_scripts.printed(WORKER_CASES, does, starts)
    assert told == [f"{worker_cases.COUNT} {worker_cases.WORKERS}"]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks for the workers in /proc")
@pytest.mark.parametrize("starts", ["fork", "forkserver"])
def test_workers_end_with_a_rank_that_is_killed(starts: str) -> None:
    """Though they heed no signal: nobody is there to end them."""
    done = forked_commands.run(WORKER_CASES, "is-killed", starts)
    assert done.returncode == 128 + signal.SIGKILL, done.stderr[-3000:]
    workers = [Path("/proc", pid) for pid in done.stdout.split()]
    assert len(workers) == worker_cases.WORKERS
    deadline = time.monotonic() + 60
    while any(_runs(worker) for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _runs(process: Path) -> bool:
    """Whether it is there, and not only its exit code."""
    try:
        return ") Z " not in (process / "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
