"""torchrun whose ranks are forked from it: all import torch, in seconds, once.

`python forked_torchrun.py FLAGS -m MODULE WORDS..`, or a script in place of `-m MODULE`. It is
torch's own, but that it forks where it would start Python. A process that forks must not have
begun to compute; this one has only imported.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Sequence

import torch._dynamo
import torch.distributed.checkpoint.filesystem  # noqa: F401
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from pipeplan import Pipeline, capture  # noqa: F401
from pipeplan.launch import train  # noqa: F401
from tests import as_python


class Forked:
    """What torchrun asks of a `subprocess.Popen` of a rank."""

    def __init__(self, command: Sequence[str], environ: dict[str, str]) -> None:
        """Forks; `command` is Python with `-u` and what follows."""
        _, flag, *words = command
        assert flag == "-u", command
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_rank, args=(words, environ))
        self._process.start()

    @property
    def pid(self) -> int:
        """Of the rank, which leads a group of its own."""
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code of a rank that has ended."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0)
        return self._process.exitcode


def _rank(words: list[str], environ: dict[str, str]) -> None:
    """What a forked rank runs: a script, or a module behind `-m`."""
    os.setsid()
    os.environ.clear()
    os.environ.update(environ)
    sys.exit(as_python.run(words))


if __name__ == "__main__":
    SubprocessHandler._popen = lambda _, command, environ: Forked(command, environ)  # type: ignore[assignment,return-value]
    # For an event that nobody reads, torch looks for the source of all modules that are there.
    dynamic_rendezvous.get_method_name = lambda depth=2: "a method"
    run.main()
