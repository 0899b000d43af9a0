"""Scripts that start ranks of their own and print one line for each case."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests import launch_task


def printed(script: Path) -> list[str]:
    """The lines that `script` prints; it must end well."""
    done = subprocess.run(
        [sys.executable, str(script)],
        env=launch_task.environment(),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()
