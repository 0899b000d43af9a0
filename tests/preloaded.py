"""Scripts in processes that are forked from one that has imported torch: its import takes seconds.

`multiprocessing`'s fork server imports `tests.imports` once in each process that runs tests; what
it forks has all of it. A script that is run here prints, ends and forks as one that Python starts.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tests import as_python, launch_task


class Ended(NamedTuple):
    """A process that has ended, with the names of `subprocess.CompletedProcess`."""

    returncode: int
    stdout: str
    stderr: str


def run(script: Path, *words: str, timeout_s: float = 240) -> Ended:
    """`python script words..` in the repository's root, forked; it and what it started must end.

    Raises:
        TimeoutError: after `timeout_s` seconds; its processes are killed then.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.imports"])
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        given = (str(script), words, launch_task.environment(), str(out), str(err))
        process = context.Process(target=_main, args=given)
        process.start()
        process.join(timeout_s)
        if process.exitcode is None:
            os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
            raise TimeoutError(f"{script} {words}: {timeout_s} s\n{err.read_text()[-3000:]}")
        return Ended(process.exitcode, out.read_text(), err.read_text())


def _main(
    script: str, words: tuple[str, ...], environ: Mapping[str, str], out: str, err: str
) -> None:
    """What the forked process does."""
    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(launch_task.ROOT)
    for path, number in ((out, 1), (err, 2)):
        with open(path, "w") as file:
            os.dup2(file.fileno(), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert "torch._dynamo" in sys.modules, "the fork server has not imported tests.imports"
    os._exit(as_python.run([script, *words]))
