"""Real processes, real messages: torchrun with gloo on the loopback device."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeplan.launch.__main__ import main
from pipeplan.layer_options import add_options
from pipeplan.plan import Semantics
from pipeplan.report.page.run_files import read_files
from tests import case_scripts, forked_commands, launch_task
from tests.launch_task import ROOT

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def torchrun(ranks: int, *words: str) -> subprocess.Popen[str]:
    """A started torchrun; its output is text."""
    return subprocess.Popen(
        [*TORCHRUN, str(ranks), *words],
        cwd=ROOT,
        env=forked_commands.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def forked(ranks: int, *words: str) -> tuple[int, str, str]:
    """As `finish`, of a torchrun of which ranks and agent have been forked."""
    script = ROOT / "tests" / "forked_torchrun.py"
    given = "--standalone", "--nproc-per-node", str(ranks), *words
    done = forked_commands.run(script, *given)
    return done.returncode, done.stdout, done.stderr


def planned(folder: Path, ranks: int, semantics: Semantics) -> str:
    """The path of a plan for the task on `ranks` ranks, two stages each."""
    plan = folder / f"plan-{semantics}-{ranks}.json"
    plan.write_text(launch_task.plan(ranks, semantics).to_json())
    return str(plan)


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of a process that must end soon."""
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def equal(file: Path, expected: dict[str, Tensor]) -> bool:
    """Whether the weights in model.pt are these, bit for bit."""
    state = torch.load(file)
    return state.keys() == expected.keys() and all(
        torch.equal(state[name], expected[name]) for name in state
    )


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.long), 4])
def test_gloo_equals_one_process(ranks: int) -> None:
    """Flush and 2bw, looped maps, ties across ranks, clipping, scaling: bit-equal over gloo."""
    told = case_scripts.printed(Path(__file__).with_name("gloo_cases.py"), str(ranks))
    assert told == ["exact 32 of 32"]


def test_launch_resumes_on_fewer_ranks(tmp_path: Path) -> None:
    """2bw on two ranks, stopped after 3 of 6 steps, resumed on one: equal to one process.

    It validates on its way.
    """
    out = tmp_path / "run"
    words = ["--plan", planned(tmp_path, 2, "2bw"), "--steps", "3", "--json", "--instrument"]
    validates = ["--task", "tests.launch_task:validated", "--validate-every", "2"]
    words += validates
    code, printed, err = forked(2, "-m", "pipeplan.launch", *words, "--out", str(out))
    assert code == 0, err[-3000:]
    assert [json.loads(line)["step"] for line in printed.splitlines()] == [1, 2, 3]
    assert "gradients are one step stale" in err
    assert "AdamW" in err
    run = json.loads((out / "run.json").read_text())
    assert run["measured"]["peak_bytes"] == run["predicted"]["peak_bytes"]
    words = ["--plan", planned(tmp_path, 1, "2bw"), "--steps", "6", "--resume", str(out)]
    assert main([*words, *validates]) == 0
    assert equal(out / "model.pt", launch_task.trained("2bw", 6).weights)
    lines = (out / "metrics.jsonl").read_text().splitlines()
    losses = launch_task.trained("2bw", 6).losses
    m = launch_task.MICROBATCHES
    assert [json.loads(line)["loss"] for line in lines] == [
        sum(losses[step * m : (step + 1) * m]) / m for step in range(6)
    ]
    told = map(json.loads, (out / "validation.jsonl").read_text().splitlines())
    values = launch_task.validation_losses("2bw", 2, 3, 4, 6)
    assert [each["loss"] for each in told] == values
    norms = [step.norm for step in read_files(str(out)).steps]
    assert norms == launch_task.trained("2bw", 6).norms
    torch.manual_seed(0)
    launch_task.task(0).model.load_state_dict(torch.load(out / "model.pt"))


def test_launch_runs_device_programs(tmp_path: Path) -> None:
    """2bw on two ranks, each with layers that run programs: one process's weights, the bytes."""
    chain = add_options(launch_task.chain(), launch_task.REFERENCE)
    plan = launch_task.with_programs(launch_task.plan_of(chain, 2, "2bw"))
    assert all(any(s.remat for s in plan.hosted(gpu)) for gpu in range(2))
    file, out = tmp_path / "plan.json", tmp_path / "run"
    file.write_text(plan.to_json())
    words = ("--plan", str(file), "--steps", "3", "--instrument", "--out", str(out))
    code, _, err = forked(2, "-m", "pipeplan.launch", *words)
    assert code == 0, err[-3000:]
    run = json.loads((out / "run.json").read_text())
    assert run["measured"]["peak_bytes"] == run["predicted"]["peak_bytes"]
    assert equal(out / "model.pt", launch_task.trained("2bw", 3).weights)


def wait_for_steps(out: Path, steps: int, process: subprocess.Popen[str]) -> None:
    """Return once the run has written `steps` lines of metrics."""
    deadline = time.monotonic() + 90
    metrics = out / "metrics.jsonl"
    while not metrics.exists() or len(metrics.read_text().splitlines()) < steps:
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def rank_pids(launcher: int) -> list[int]:
    """Processes that torchrun started, by rank."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    ranks = {}
    for child in map(int, children):
        with suppress(ProcessLookupError, FileNotFoundError):  # it has ended meanwhile
            environ = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            ranks.update({int(e[5:]): child for e in environ if e.startswith(b"RANK=")})
    return [ranks[rank] for rank in sorted(ranks)]


def wait_for_restart(before: list[int], process: subprocess.Popen[str]) -> None:
    """Return once torchrun has other ranks than `before`."""
    deadline = time.monotonic() + 90
    while len(now := rank_pids(process.pid)) < len(before) or set(now) & set(before):
        assert process.poll() is None, process.communicate()[1][-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the ranks in /proc")
def test_a_killed_rank_then_a_signal(tmp_path: Path) -> None:
    """The life of one launch under torchrun.

    When a rank dies, the other ends with a line that names its peer, and waits for nothing. With
    `--max-restarts` that costs the steps since the last save, and nothing else. SIGTERM to
    torchrun, which forwards it, and to the ranks, as from who ends a whole job: all ranks stop at
    one step, saved, equal to that many steps alone.
    """
    out = tmp_path / "run"
    words = ("--steps", "1000000", "--save-every", "40", "--out", str(out))
    plan = planned(tmp_path, 2, "2bw")
    restarts = ("--max-restarts", "1")
    process = torchrun(2, *restarts, "-m", "pipeplan.launch", "--plan", plan, *words)
    wait_for_steps(out, 42, process)
    ranks = rank_pids(process.pid)
    os.kill(ranks[1], signal.SIGKILL)
    wait_for_restart(ranks, process)
    done = len((out / "metrics.jsonl").read_text().splitlines())
    told = (out / "rank0.error.txt").read_text()
    wait_for_steps(out, done + 3, process)
    for each in (process.pid, *rank_pids(process.pid)):
        os.kill(each, signal.SIGTERM)
    _, _, err = finish(process)
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert "rank 0: action" in said[0]
    assert "peer rank 1) lost its peer" in said[0]
    assert "now: " in told
    run = json.loads((out / "run.json").read_text())
    assert not run["complete"]
    assert run["first_step"] >= 40
    assert run["first_step"] % 40 == 0
    assert f"stopped after step {run['steps']}" in err
    assert (out / "checkpoint" / f"step-{run['steps']:08d}" / ".metadata").exists()
    assert equal(out / "model.pt", launch_task.trained("2bw", run["steps"]).weights)


def test_refusal_under_torchrun(tmp_path: Path) -> None:
    """A wrong world size: one message, also at the end; all end with 2, no traceback of ours."""
    plan = planned(tmp_path, 1, "flush")
    code, _, err = finish(torchrun(2, "-m", "pipeplan.launch", "--plan", plan))
    assert code != 0
    message = "error: launch: got 2 ranks, need 1"
    assert [line for line in err.splitlines() if line.startswith(message)]
    assert err.count(message) == 2
    assert f"traceback : {message}" in err[err.index("Root Cause") :]
    assert "exitcode  : 2" in err
    assert f'File "{ROOT / "pipeplan"}' not in err
