"""What `launch` writes beside checkpoints: nothing is lost, no failure hides behind another."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from pipeplan.errors import InputError, RankError
from pipeplan.launch import ending, logs
from pipeplan.launch.checks import prepare
from pipeplan.launch.options import parse
from pipeplan.runtime.checkpoint import storage
from pipeplan.runtime.transport.torchrun_env import TorchrunEnv
from tests import launch_task

ALONE = TorchrunEnv(rank=0, size=1, attempt=0, launched=False, local_rank=0, local_size=1)


def metrics(folder: Path, text: str) -> Path:
    """A metrics.jsonl with this text."""
    file = folder / "metrics.jsonl"
    file.write_text(text)
    return file


def test_a_resumed_run_keeps_the_lines_of_its_past(tmp_path: Path) -> None:
    """Lines after the checkpoint go, and one that was cut short; the others stay as they are."""
    lines = [json.dumps({"step": step, "loss": 0.5}) + "\n" for step in range(1, 5)]
    file = metrics(tmp_path, "".join(lines) + '{"step": 5, "lo')
    logs.drop_after(file, 3)
    assert file.read_text() == "".join(lines[:3])
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_metrics_survive_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the shorter file cannot be written, the longer one is still there."""
    lines = [json.dumps({"step": step}) + "\n" for step in (1, 2)]
    file = metrics(tmp_path, "".join(lines))
    write = Path.write_bytes

    def full(self: Path, content: bytes) -> int:
        write(self, content[:3])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space"):
        logs.drop_after(file, 1)
    assert file.read_text() == "".join(lines)
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"loss": 1}', '{"step": null}'])
def test_foreign_metrics_are_named(tmp_path: Path, line: str) -> None:
    """A line that no run wrote is refused with what to do, and stays."""
    file = metrics(tmp_path, '{"step": 1}\n' + line + "\n")
    with pytest.raises(InputError, match=re.escape(f"metrics.jsonl: got {line!r}, need")):
        logs.drop_after(file, 1)
    assert file.read_text().endswith(line + "\n")


def leaves_by_raising(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of the end of the process."""

    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(signal, "signal", lambda *_: None)


@pytest.mark.parametrize("writable", [True, False])
def test_a_failure_is_told_also_where_nothing_can_be_written(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    writable: bool,
) -> None:
    """The one line says what failed, and where the traceback is or why it is nowhere."""
    leaves_by_raising(monkeypatch)
    out = tmp_path / "run"
    if not writable:
        out.write_text("a file in its place")
    with pytest.raises(SystemExit) as ended:
        ending.fail(OSError(28, "No space left on device"), ALONE, None, out)
    assert ended.value.code == 1
    said = capfd.readouterr().err
    assert said.startswith("error: rank 0: OSError: [Errno 28] No space left on device (traceback")
    assert said.count("\n") == 1
    assert ("could not be written: " in said) != writable


def test_a_failure_names_the_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is one, it is told how to go on; a folder without is not offered as one."""
    leaves_by_raising(monkeypatch)

    def latest(out: Path) -> Path:
        if isinstance(kept, Exception):
            raise kept
        return kept

    monkeypatch.setattr(storage, "latest", latest)
    for kept in (Path("step-00000004"), InputError("none"), OSError(5, "Input/output error")):
        with pytest.raises(SystemExit):
            ending.fail(RankError("rank 1: is gone"), ALONE, None, tmp_path / "run")
        said = capfd.readouterr().err
        resumed = f"; step-00000004 is complete: go on with --resume {tmp_path / 'run'}\n"
        assert said.startswith("error: rank 1: is gone")
        assert said.endswith(resumed) == isinstance(kept, Path)


def test_a_restart_starts_anew_where_nothing_complete_was_saved(tmp_path: Path) -> None:
    """A rank that torchrun restarted resumes from complete checkpoints only."""
    torn = tmp_path / "run" / "checkpoint" / "step-00000002"
    torn.mkdir(parents=True)
    (torn / ".metadata").write_bytes(b"half of it")
    plan = tmp_path / "plan.json"
    plan.write_text(launch_task.plan(1, "flush").to_json())
    options = parse(["--plan", str(plan), "--steps", "1", "--out", str(tmp_path / "run")])
    setup = prepare(options, replace(ALONE, attempt=1))
    assert (setup.checkpoint, setup.first_step) == (None, 0)
