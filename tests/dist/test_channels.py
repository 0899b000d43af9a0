"""Real processes that exchange messages over one group per directed boundary."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests import launch_task


def test_messages_without_tags() -> None:
    """Four ranks, looped and straight, both modes: bit-equal though no message has a tag."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("channel_cases.py"))],
        env=launch_task.environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        f"{semantics} {stages}: exact" for stages in (6, 4) for semantics in ("flush", "2bw")
    ], done.stderr[-3000:]
