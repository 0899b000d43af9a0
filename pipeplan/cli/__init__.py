"""The `pipeplan` command: one small file per verb, each a thin call of the library.

Verbs import what they need when they run, so `--help` is instant and planning needs no torch.
Nothing is imported here before `main` listens to Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Sequence

from pipeplan import interrupts


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit code."""

    def run() -> int:
        from pipeplan.cli import entry

        return entry.main(argv)

    return interrupts.exit_code_of("pipeplan", run)
