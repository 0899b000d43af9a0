"""`--keep N`: the newest N complete checkpoints stay, and the way back is never cut."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from pipeplan.errors import RankError
from pipeplan.launch import __main__ as launch
from pipeplan.launch import ending, export
from pipeplan.pinned import PinnedPool
from pipeplan.plan import Semantics
from pipeplan.runtime.checkpoint import storage
from pipeplan.runtime.checkpoint.writer import CheckpointWriter, HostCopies
from pipeplan.runtime.transport.gloo import LocalTransport
from tests import launch_task


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where checkpoints lie, with a plan beside it."""
    (tmp_path / "plan.json").write_text(launch_task.plan(1, "flush").to_json())
    return tmp_path / "run"


def run(out: Path, steps: int, *words: str) -> int:
    """A launch up to `steps`, saving every step."""
    plan = str(out.parent / "plan.json")
    given = ["--plan", plan, "--steps", str(steps), "--save-every", "1", *words]
    return launch.main(given)


def steps(out: Path) -> list[int]:
    """Of the complete checkpoints."""
    paths = filter(storage.is_complete, storage.folders(out))
    return [storage.read_meta(path).step for path in paths]


@pytest.mark.parametrize("words", [(), ("--save-in-background",)])
def test_the_newest_stay(out: Path, words: tuple[str, ...]) -> None:
    """Two of five, nothing of the others; a resumed run goes on exactly and prunes as well."""
    assert run(out, 5, "--out", str(out), "--keep", "2", *words) == 0
    assert steps(out) == [4, 5]
    assert [path.name for path in storage.folders(out)] == ["step-00000004", "step-00000005"]
    assert run(out, 6, "--resume", str(out), "--keep", "1", *words) == 0
    assert steps(out) == [6]
    expected = launch_task.trained("flush", 6).weights
    state = torch.load(out / "model.pt")
    assert all(torch.equal(state[name], value) for name, value in expected.items())


def test_all_stay_without_the_flag(out: Path) -> None:
    """Nothing is removed that nobody asked to."""
    assert run(out, 3, "--out", str(out)) == 0
    assert steps(out) == [1, 2, 3]


def test_the_one_resumed_from_stays_until_there_is_a_newer_one(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the next checkpoint fails, the old one is still whole."""
    assert run(out, 2, "--out", str(out), "--keep", "1") == 0
    seen: list[list[int]] = []
    write = storage.write

    def looks(*arguments: object, **options: object) -> None:
        seen.append(steps(out))
        write(*arguments, **options)  # type: ignore[arg-type]
        seen.append(steps(out))

    monkeypatch.setattr(storage, "write", looks)
    assert run(out, 3, "--resume", str(out), "--keep", "1") == 0
    assert seen == [[2], [2, 3]]
    assert steps(out) == [3]


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_results_that_failed_are_written_by_a_resume(
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    semantics: Semantics,
) -> None:
    """All steps are saved, model.pt is not: nothing is trained, and once is enough."""
    (out.parent / "plan.json").write_text(launch_task.plan(1, semantics).to_json())
    with monkeypatch.context() as context:
        context.setattr(export.UserModel, "write", mock.Mock(side_effect=OSError("disk full")))
        context.setattr(ending, "fail", mock.Mock(side_effect=SystemExit))
        with pytest.raises(SystemExit):
            run(out, 3, "--out", str(out))
    assert not (out / "model.pt").exists()
    told = (out / "metrics.jsonl").read_text()
    capfd.readouterr()
    assert run(out, 3, "--resume", str(out)) == 0
    said = capfd.readouterr().err
    assert "all 3 steps are done and saved: the results are written" in said
    assert "next: pipeplan report" not in said, "nothing was measured"
    state, expected = torch.load(out / "model.pt"), launch_task.trained(semantics, 3).weights
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    written = json.loads((out / "run.json").read_text())
    assert (written["steps"], written["first_step"], written["complete"]) == (3, 3, True)
    assert (out / "metrics.jsonl").read_text() == told
    assert run(out, 3, "--resume", str(out)) == 2
    assert "3 steps are done, and --steps 3 is the total" in capfd.readouterr().err
    assert run(out, 3, "--resume", str(out), "--out", str(out.parent / "other")) == 2


def test_torn_and_damaged_ones_are_not_touched(out: Path) -> None:
    """They are not counted either: two whole ones stay beside them."""
    assert run(out, 4, "--out", str(out)) == 0
    torn, damaged = storage.step_folder(out, 1), storage.step_folder(out, 4)
    (torn / ".metadata").unlink()
    (damaged / ".metadata").write_bytes(b"?")
    storage.prune(out, 2)
    assert steps(out) == [2, 3]
    assert torn.exists()
    assert damaged.exists()
    storage.prune(out, 1)
    assert steps(out) == [3]


def test_copies_by_another_name_are_none(out: Path) -> None:
    """A user's `step-best` is neither counted nor gone on from; steps are sorted by number."""
    assert run(out, 2, "--out", str(out)) == 0
    best, far = out / "checkpoint" / "step-best", storage.step_folder(out, 100_000_000)
    shutil.copytree(storage.step_folder(out, 1), best)
    storage.prune(out, 1)
    assert steps(out) == [2]
    assert storage.latest(out) == storage.step_folder(out, 2)
    assert storage.is_complete(best)
    shutil.copytree(best, far)
    shutil.copytree(best, storage.step_folder(out, 99_999_999))
    assert storage.latest(out) == far
    assert storage.behind(out, 99_999_999) == [far]


def test_what_cannot_be_removed_is_said(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the flag and the file; the newest checkpoint is there."""
    saver = CheckpointWriter(LocalTransport(), background=False, keep=1)
    meta = storage.CheckpointMeta(
        step=1, seed=0, semantics="flush", microbatches=1, task_digest="", plan_digest=""
    )

    def refuse(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    saver.save(storage.step_folder(out, 1), meta, [])
    monkeypatch.setattr(storage.shutil, "rmtree", refuse)
    with pytest.raises(RankError, match=r"--keep 1: .*step-00000001 could not be removed: Perm"):
        saver.save(storage.step_folder(out, 2), meta, [])
    assert storage.is_complete(storage.step_folder(out, 2))


def test_keep_needs_a_place(out: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without --out there is nothing to keep; none or a fraction of a checkpoint is refused."""
    plan = str(out.parent / "plan.json")
    assert launch.main(["--plan", plan, "--keep", "2"]) == 2
    assert "got --keep without --out" in capfd.readouterr().err
    assert run(out, 1, "--out", str(out), "--keep", "0") == 2
    assert "got '0', need an integer from 1" in capfd.readouterr().err


def counted(pool: dict[int, int]) -> tuple[Callable[[int, int], None], Callable[[int], None]]:
    """Locks that only write down which memory is locked."""
    return pool.__setitem__, lambda address: pool.pop(address, None)  # type: ignore[return-value]


def test_copies_of_a_gpu_take_page_locked_memory_once() -> None:
    """What leaves the device lies in the pool, equal and apart; the next state takes its place."""
    locked: dict[int, int] = {}
    copies = HostCopies(PinnedPool(*counted(locked)), leaves=lambda tensor: tensor.dim() > 0)
    state = {"w": torch.arange(6.0).reshape(2, 3).t(), "step": torch.tensor(3.0), "name": "x"}
    arrived = copies.begin(state)
    state["w"].zero_()
    copied = arrived()
    assert torch.equal(copied["w"], torch.arange(6.0).reshape(2, 3).t())
    assert copied["w"].data_ptr() in locked
    assert copied["step"].data_ptr() not in locked
    assert copied["step"].data_ptr() != state["step"].data_ptr()
    assert copied["name"] == "x"
    del copied, arrived
    again = copies.begin(state)()
    assert again["w"].data_ptr() in locked
    assert len(locked) == 1


def test_another_recipe_is_told(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint that was trained with another loss is taken, and the run says so."""
    assert run(out, 1, "--out", str(out)) == 0
    assert "goes on with another" not in "".join(capsys.readouterr())
    path = storage.latest(out)
    meta = storage.read_meta(path)
    other = meta.model_copy(update={"recipe": {**meta.recipe, "loss": "MSELoss()"}})
    (path / "pipeplan.json").write_text(other.to_json())
    (path / "metadata.sha256").unlink()
    assert run(out, 2, "--resume", str(out)) == 0
    told = "".join(capsys.readouterr())
    assert "goes on with another loss: the checkpoint was trained with MSELoss(), this" in told
    assert told.count("goes on with another") == 1
