"""Real processes, real messages: torchrun with gloo on the loopback device."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pipeplan.launch.__main__ import main
from pipeplan.layer_options import add_options
from pipeplan.plan import Semantics
from pipeplan.report.page.run_files import read_files
from tests import case_scripts, launch_task, preloaded
from tests.launch_task import ROOT

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]


def torchrun(ranks: int, *words: str) -> subprocess.Popen[str]:
    """A started torchrun; its output is text."""
    return subprocess.Popen(
        [*TORCHRUN, str(ranks), *words],
        cwd=ROOT,
        env=launch_task.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def forked(ranks: int, *words: str) -> preloaded.Ended:
    """A torchrun that has ended, of which ranks and agent have been forked."""
    script = ROOT / "tests" / "forked_torchrun.py"
    return preloaded.run(script, "--standalone", "--nproc-per-node", str(ranks), *words)


def planned(folder: Path, ranks: int, semantics: Semantics) -> str:
    """The path of a plan for the task on `ranks` ranks, two stages each."""
    plan = folder / f"plan-{semantics}-{ranks}.json"
    plan.write_text(launch_task.plan(ranks, semantics).to_json())
    return str(plan)


def launched(folder: Path, ranks: int, semantics: Semantics, *words: str) -> subprocess.Popen[str]:
    """A started launch of the task."""
    plan = planned(folder, ranks, semantics)
    return torchrun(ranks, "-m", "pipeplan.launch", "--plan", plan, *words)


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


@pytest.mark.parametrize("ranks", [2, 4])
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


def test_signal_saves_at_a_step_boundary(tmp_path: Path) -> None:
    """SIGTERM to torchrun: all ranks stop at one step, saved, equal to that many steps alone."""
    out = tmp_path / "run"
    process = launched(tmp_path, 2, "2bw", "--steps", "1000000", "--out", str(out))
    wait_for_steps(out, 2, process)
    process.send_signal(signal.SIGTERM)
    _, _, err = finish(process)
    run = json.loads((out / "run.json").read_text())
    assert not run["complete"]
    assert f"stopped after step {run['steps']}" in err
    assert (out / "checkpoint" / f"step-{run['steps']:08d}" / ".metadata").exists()
    assert equal(out / "model.pt", launch_task.trained("2bw", run["steps"]).weights)


def rank_pids(launcher: int) -> list[int]:
    """Processes that torchrun started, by rank."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    ranks = {}
    for child in map(int, children):
        environ = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        ranks.update({int(e[5:]): child for e in environ if e.startswith(b"RANK=")})
    return [ranks[rank] for rank in sorted(ranks)]


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the ranks in /proc")
def test_killed_rank_is_named(tmp_path: Path) -> None:
    """When a rank dies, the other ends with a line that names its peer, and waits for nothing."""
    out = tmp_path / "run"
    process = launched(tmp_path, 2, "flush", "--steps", "1000000", "--out", str(out))
    wait_for_steps(out, 2, process)
    os.kill(rank_pids(process.pid)[1], signal.SIGKILL)
    code, _, err = finish(process)
    assert code != 0
    said = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert "rank 0: action" in said[0]
    assert "peer rank 1) lost its peer" in said[0]
    assert "now: " in (out / "rank0.error.txt").read_text()


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds the ranks in /proc")
def test_torchrun_restarts_and_resumes(tmp_path: Path) -> None:
    """`--max-restarts`: a killed rank costs the steps since the last save, and nothing else."""
    out, steps = tmp_path / "run", 80
    plan = tmp_path / "plan.json"
    plan.write_text(launch_task.plan(2, "2bw").to_json())
    words = ("--steps", str(steps), "--save-every", "5", "--out", str(out))
    process = subprocess.Popen(
        [
            *(*TORCHRUN, "2", "--max-restarts", "1"),
            *("-m", "pipeplan.launch", "--plan", str(plan), *words),
        ],
        cwd=ROOT,
        env=launch_task.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_steps(out, 12, process)
    os.kill(rank_pids(process.pid)[1], signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 0, err[-3000:]
    first = json.loads((out / "run.json").read_text())["first_step"]
    assert first >= 10
    assert first % 5 == 0
    assert equal(out / "model.pt", launch_task.trained("2bw", steps).weights)


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


def test_launch_needs_no_ortools(tmp_path: Path) -> None:
    """With ortools blocked a plan still trains, and gives the weights of one process."""
    plan = tmp_path / "plan.json"
    plan.write_text(launch_task.plan(1, "flush").to_json())
    code = (
        "import runpy, sys; sys.modules['ortools'] = None; sys.argv[0] = 'launch';"
        "runpy.run_module('pipeplan.launch', run_name='__main__')"
    )
    words = ["--plan", str(plan), "--steps", "2", "--out", str(tmp_path / "run")]
    subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, env=launch_task.environment(), check=True
    )
    assert equal(tmp_path / "run" / "model.pt", launch_task.trained("flush", 2).weights)
