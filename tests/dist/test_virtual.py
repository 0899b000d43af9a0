"""Real processes and real messages on the virtual clock."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests import launch_task


def test_gloo_ranks_keep_the_simulators_time() -> None:
    """2, 4, 8 and 16 processes over gloo: every action ends when the simulator says."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("virtual_cases.py"))],
        env=launch_task.environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == [
        f"{ranks} ranks: exact 2 of 2" for ranks in (2, 4, 8, 16)
    ], done.stderr[-3000:]
