"""Launches of plans as processes of this machine, and what they measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from pipeplan.action_times import FILE, ActionTimes
from pipeplan.errors import RankError
from pipeplan.plan import Plan
from pipeplan.report.run import RunMeasurements, read


class Launched(NamedTuple):
    """What a launch left."""

    measured: RunMeasurements
    times: ActionTimes | None
    """Of the actions of one step; None of a run that was too short."""


class LocalLaunches:
    """A process of `pipeplan.launch.local`, which starts the ranks of one launch after the other.

    A context: what runs at its end is ended.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pipeplan-launch-")
        self._count = 0

    def __enter__(self) -> Self:
        """Starts the process; it imports torch beside what follows."""
        self._errors = Path(self._folder.name, "errors")
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipeplan.launch.local"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={"OMP_NUM_THREADS": "1", **os.environ},
                start_new_session=True,  # Ctrl-C is this process's, which ends the ranks
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Ends the process and its ranks, and removes their files."""
        self._process.communicate()
        self._folder.cleanup()

    def run(self, plan: Plan, words: Sequence[str], *, fresh: bool = False) -> Launched:
        """A launch of `plan`.

        Args:
            plan: one rank for each of its GPUs.
            words: flags of `pipeplan.launch`.
            fresh: whether ranks are new processes, as torchrun's are; they start seconds later.

        Raises:
            RankError: if the launch failed; the message is what its first rank said.
        """
        self._count += 1
        place = Path(self._folder.name, str(self._count))
        place.mkdir()
        file, log, out = place / "plan.json", place / "log", place / "run"
        file.write_text(plan.to_json(), encoding="utf-8")
        flags = ["--plan", str(file), "--out", str(out), *words]
        codes = self._answer(
            {"ranks": len(plan.memory), "words": flags, "log": str(log), "fresh": fresh}
        )
        if any(codes):
            raise RankError(_said(log) or f"its ranks ended with {codes}")
        times = ActionTimes.read(out / FILE) if (out / FILE).exists() else None
        return Launched(read(out).measured, times)

    def _answer(self, asked: dict[str, object]) -> list[int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = ""
        try:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            pass
        if not line:
            raise RankError(f"the process that starts ranks ended: {_last(self._errors)}")
        codes: list[int] = json.loads(line)
        return codes


def _said(log: Path) -> str:
    """The first error that ranks told."""
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    told = [line for line in text.splitlines() if line.startswith("error: ")]
    return told[0].removeprefix("error: ") if told else _last(log)


def _last(file: Path) -> str:
    lines = (
        file.read_text(encoding="utf-8", errors="replace").splitlines() if file.exists() else []
    )
    return lines[-1] if lines else ""
