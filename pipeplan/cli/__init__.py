"""The `pipeplan` command: one small file per verb, each a thin call of the library.

Verbs import what they need when they run, so `--help` is instant and planning needs no torch.
"""

from pipeplan.cli.entry import main

__all__ = ["main"]
