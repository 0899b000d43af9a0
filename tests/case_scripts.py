"""Scripts that start ranks of their own and print one line for each case."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests import launch_task


def printed(script: Path, *words: str, timeout_s: float = 240) -> list[str]:
    """The lines that `script` with `words` prints; it must end well."""
    done = subprocess.run(
        [sys.executable, str(script), *words],
        cwd=launch_task.ROOT,
        env=launch_task.environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()
