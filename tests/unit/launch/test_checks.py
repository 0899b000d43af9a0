"""What `launch` refuses before any process group exists: exit code and one message."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch.distributed
from torch.distributed.checkpoint.metadata import Metadata

from pipeplan import launch
from pipeplan.launch import __main__ as entry
from tests import launch_task


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a plan for one GPU, one for two, and broken ones."""
    folder = tmp_path_factory.mktemp("plans")
    for gpus in (1, 2):
        (folder / f"plan{gpus}.json").write_text(launch_task.plan(gpus, "flush").to_json())
    one = launch_task.plan(1, "flush")
    (folder / "broken.json").write_text(one.to_json()[:-40])
    late = one.model_copy(update={"period_ns": one.period_ns - 1})
    (folder / "invalid.json").write_text(late.to_json())
    (folder / "nowhere").symlink_to(folder / "gone")
    full = folder / "full"
    full.mkdir()
    (full / "precious.txt").write_text("do not touch")
    return folder


def run(plans: Path, words: str, **environ: str) -> int:
    """`launch` with `words`, in which `@` stands for the folder of plans."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "WORLD_SIZE"):
            patch.delenv(name, raising=False)
        for name, value in environ.items():
            patch.setenv(name, value)
        patch.setattr(entry, "_PATIENCE_S", 0.0)
        patch.setattr(torch.distributed, "init_process_group", pytest.fail)
        return entry.main(words.replace("@", f"{plans}/").split())


REFUSED = [
    ("", 2, "--plan"),
    ("--plan @nothing.json", 2, "cannot be read"),
    ("--plan @broken.json", 2, "need JSON"),
    ("--plan @invalid.json", 4, "step_ns"),
    ("--plan @plan2.json", 2, "got 1 rank, need 2"),
    ("--plan @plan2.json --steps 7", 2, "plan2.json --steps 7"),
    ("--plan @plan2.json --replicas 3", 2, "need 6, one per GPU of "),
    ("--plan @plan2.json --replicas 0", 2, "from 1"),
    ("--plan @plan1.json --clock virtual --replicas 2", 2, "got --replicas with --clock virtual"),
    ("--plan @plan1.json --clock virtual --backend gloo", 2, "got --backend with --clock virtual"),
    ("--plan @plan1.json --backend nccl", 2, "backend: got nccl"),
    ("--plan @plan1.json --backend mpi", 2, "invalid choice: 'mpi'"),
    ("--plan @plan1.json --steps 0", 2, "from 1"),
    ("--plan @plan1.json --step 3", 2, "unrecognized"),
    ("--plan @plan1.json --timeout soon", 2, "'soon'"),
    ("--plan @plan1.json --task nowhere:task", 2, "nowhere"),
    ("--plan @plan1.json --task tests.launch_task:other_task", 2, "digest"),
    ("--plan @plan2.json --task tests.launch_task:misread --dry-run", 2, "got ReduceLROnPlateau"),
    ("--plan @plan2.json --task tests.launch_task:exiting --dry-run", 2, "has exited: SystemExit"),
    ("--plan @plan1.json --out @full", 2, "is ever overwritten. Choose another directory\n"),
    ("--plan @plan1.json --timeout 0s", 2, "got '0s', need at least 1ms"),
    ("--plan @plan1.json --out @plan1.json", 2, "need a directory"),
    ("--plan @plan1.json --out @plan1.json/run", 2, "plan1.json is a file, need a directory"),
    ("--plan @plan1.json --out @nowhere/run", 2, "nowhere is a link to nothing, need a directory"),
    ("--plan @plan1.json --save-every 2", 2, "got --save-every without --out"),
    ("--plan @plan1.json --instrument", 2, "got --instrument without --out"),
    ("--plan @plan1.json --save-in-background --out @run", 2, "without --save-every"),
    ("--plan @plan1.json --dry-run --json --log-format json", 2, "got --json with --log-format"),
    ("--plan @plan1.json --json --log-format json", 2, "got --json with --log-format, need one"),
    ("--plan @plan1.json --clock virtual --log-format json", 2, "got --log-format with --clock"),
    ("--plan @plan1.json --validate-every 2", 2, "and a task without validation data. Give Task("),
    ("--plan @plan1.json --out @run --keep-best loss", 2, "without --validate-every, need it too"),
    ("--plan @plan1.json --validate-every 2 --keep-best loss", 2, "got --keep-best without --out"),
    ("--plan @plan1.json --keep-best loss:most", 2, "got 'loss:most', need loss or a metric"),
    ("--plan @plan1.json --tensorboard", 2, "got --tensorboard without --out"),
    ("--plan @full", 2, "full: cannot be read: Is a directory"),
    ("--plan @plan1.json --timeout 5", 2, "got '5', need a number with one of ns"),
    ("--plan @plan1.json --timeout 1e20s", 2, "need at most"),
    ("--plan @plan1.json --stesp 4", 2, "unrecognized argument: --stesp, perhaps --steps"),
    ("--plan @plan1.json --timeout -1s", 2, "got '-1s', which is below 0"),
    ("--plan @plan1.json --seed 3.0", 2, "got '3.0', need an integer"),
    ("--plan @plan1.json --clock sleep --time-scale nan", 2, "got 'nan', need a number above 0"),
    ("--plan @plan1.json --resume @full", 2, "no complete checkpoint"),
]


@pytest.mark.parametrize(("words", "code", "said"), REFUSED)
def test_refusals(
    plans: Path, capfd: pytest.CaptureFixture[str], words: str, code: int, said: str
) -> None:
    """Each wrong input gives its exit code and one line that names it, never a traceback."""
    assert run(plans, words) == code
    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert said in printed.err
    assert "Traceback" not in printed.err


@pytest.mark.parametrize("name", ["--plan", "--out", "--resume"])
def test_a_name_that_was_never_set(
    plans: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    """An empty variable of a script is not the directory it runs in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry, "_PATIENCE_S", 0.0)
        assert entry.main(["--plan", str(plans / "plan1.json"), name, ""]) == 2
    assert f"argument {name}: got '', need a name" in capfd.readouterr().err


def test_world_size_under_torchrun(plans: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A world size that differs from the plan names both, also in a dry run."""
    assert run(plans, "--plan @plan2.json --dry-run", RANK="0", WORLD_SIZE="3") == 2
    assert "got 3 ranks, need 2" in capfd.readouterr().err


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("words", ["--plan @plan1.json", "--plan @plan1.json --dry-run", ""])
def test_an_environment_of_words(
    plans: Path, capfd: pytest.CaptureFixture[str], name: str, words: str
) -> None:
    """A rank that does not know its place says which variable is wrong, at once."""
    assert run(plans, words, **{name: "two"}) == 2
    assert f"error: environment: {name}: got 'two', need an integer" in capfd.readouterr().err


def test_only_one_rank_speaks_at_once(plans: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Ranks other than 0 say who they are, after rank 0 had its time to speak."""
    waited: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entry.time, "sleep", waited.append)
        assert run(plans, "--plan @broken.json", RANK="1", WORLD_SIZE="2") == 2
    assert waited == [0.0]
    assert capfd.readouterr().err.startswith("error: rank 1: ")


def test_dry_run_shows_the_ranks(plans: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A dry run checks everything, needs no torchrun and makes no directory."""
    out = plans / "never"
    assert run(plans, f"--plan @plan2.json --dry-run --out {out}") == 0
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[1].split()[0] == "0"
    named = [part.split(": ")[1] for line in lines[1:3] for part in line.split("; ")]
    ends = [part.split(" .. ") for part in named]
    assert all(len(set(pair)) == len(pair) for pair in ends), "a layer alone is named once"
    assert "All checks passed" in lines[-1]
    assert lines[-1].startswith("2 ranks: ")
    assert not out.exists()


def test_a_dry_run_makes_optimizers_that_look_at_values(
    plans: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Layers of other ranks have no memory there."""
    assert run(plans, "--plan @plan2.json --dry-run --task tests.launch_task:looking") == 0
    assert "All checks passed" in capfd.readouterr().out


@pytest.mark.parametrize("logs", ["--json", "--log-format json", "--clock virtual --json"])
def test_a_dry_run_takes_the_flags_of_the_run(
    plans: Path, capfd: pytest.CaptureFixture[str], logs: str
) -> None:
    """How the run would log is no matter: recipes add --dry-run to whatever they are given."""
    assert run(plans, f"--plan @plan1.json {logs} --dry-run") == 0
    assert capfd.readouterr().out.splitlines()[-1].startswith("1 rank: ")


def test_a_dry_run_counts_replicas(plans: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As many ranks as torchrun has to start."""
    assert run(plans, "--plan @plan2.json --replicas 3 --dry-run") == 0
    assert capfd.readouterr().out.splitlines()[-1].startswith("6 ranks: ")


@pytest.mark.parametrize(
    ("change", "words", "said"),
    [
        ({"semantics": "2bw"}, "", "semantics"),
        ({"semantics": "2bw", "microbatches": 7}, "", "--semantics 2bw --microbatches 7."),
        ({"microbatches": 7}, "", "micro-batches per step is 7"),
        ({"task_digest": "other"}, "", "task digest"),
        ({}, " --seed 4", "seed is 3"),
        ({}, " --steps 4", "5 steps are done, and --steps 4"),
    ],
)
def test_resume_refusals(
    plans: Path,
    capfd: pytest.CaptureFixture[str],
    change: dict[str, object],
    words: str,
    said: str,
) -> None:
    """A checkpoint of another run is refused with what differs."""
    task_digest = launch_task.plan(1, "flush").task_digest
    stored = {"semantics": "flush", "microbatches": launch_task.MICROBATCHES, "seed": 3, "step": 5}
    stored |= {"task_digest": task_digest, "plan_digest": "any", **change}
    folder = plans / "old" / "checkpoint" / "step-00000005"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({}, storage_data={})))
    (folder / "pipeplan.json").write_text(
        json.dumps({"format": "pipeplan-checkpoint/1", **stored})
    )
    assert run(plans, f"--plan @plan1.json --resume @old{words}") == 2
    assert said in capfd.readouterr().err


def test_package_says_how_to_run_it() -> None:
    """The package's own words name the command."""
    assert "torchrun" in (launch.__doc__ or "")
