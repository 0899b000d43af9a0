"""Scripts that start ranks of their own and print one line for each case."""

from __future__ import annotations

from pathlib import Path

from tests import forked_commands


def printed(script: Path, *words: str, timeout_s: float = 240) -> list[str]:
    """The lines that `script` with `words` prints; it must end well."""
    done = forked_commands.run(script, *words, timeout_s=timeout_s)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()
