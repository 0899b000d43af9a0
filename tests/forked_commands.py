"""Commands that are forked from a process that has imported torch: its import takes seconds.

A `Server` listens on a socket. Its programs hand it their words, folder, environment and standard
streams, and end with the exit code of what it forks: a module, a script or a text of Python. What
is run so prints, ends and forks as what Python starts.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests import as_python

ROOT = Path(__file__).parents[1]
FOLDER = "PIPEPLAN_TESTS_FORK_IN"
"""Variable with the folder of a server that several processes share."""
_CLIENT = """\
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as server:
    server.connect(sys.argv[1])
    asked = json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)])
    socket.send_fds(server, [asked.encode()], [0, 1, 2])
    server.shutdown(socket.SHUT_WR)
    code = server.recv(8)
sys.exit(int(code) if code else "the process that forks commands is gone")
"""


class Client:
    """Has commands forked by the server whose folder this is."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / "socket"
        self._client = folder / "client.py"

    def command(self, *words: str) -> list[str]:
        """What to run in place of Python with these words; killed, it ends what was forked."""
        return [sys.executable, "-IS", str(self._client), str(self._socket), *words]

    def program(self, path: Path, words: Sequence[str]) -> None:
        """Write a program that is Python with these words and its own."""
        path.write_text(f'#!/bin/sh\nexec {shlex.join(self.command(*words))} "$@"\n')
        path.chmod(0o755)


class Server(Client):
    """A process that forks commands for all who know its folder."""

    def __init__(self) -> None:
        """Starts it; imports go on beside what follows."""
        self._folder = tempfile.TemporaryDirectory()
        self.folder = Path(self._folder.name)
        super().__init__(self.folder)
        self._client.write_text(_CLIENT)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self._socket))
            listener.listen()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.forked_commands", str(listener.fileno())],
                cwd=ROOT,
                pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE,
                env=environment(),
            )

    def close(self) -> None:
        """It ends with the last word on its standard input; so it does when this process dies."""
        self._process.communicate(timeout=60)
        self._folder.cleanup()


@functools.cache
def client() -> Client:
    """Of the server that several processes of tests share (conftest.py), or of this one's own."""
    if shared := os.environ.get(FOLDER):
        return Client(Path(shared))
    server = Server()
    atexit.register(server.close)
    return server


def run(script: Path, *words: str, timeout_s: float = 240) -> subprocess.CompletedProcess[str]:
    """`python script words..` in the repository's root, forked; it and what it started must end.

    Raises:
        TimeoutError: after `timeout_s` seconds; its processes are killed then.
    """
    try:
        return subprocess.run(
            client().command(str(script), *words),
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        said = (late.stderr or b"").decode()[-3000:]
        raise TimeoutError(f"{script} {words}: {timeout_s} s\n{said}") from late


def environment() -> dict[str, str]:
    """One thread per rank, messages over the loopback device."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def _serve(listener: socket.socket) -> None:
    """Fork each command, until the standard input ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            return
        connection, _ = listener.accept()
        with connection:
            if os.fork() == 0:
                listener.close()
                _answer(connection)


def _answer(connection: socket.socket) -> None:
    """Run what a program asks for in one more process, and say how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    text, streams, _, _ = socket.recv_fds(connection, 2**16, 3)
    while more := connection.recv(2**16):
        text += more
    words, folder, environ = json.loads(text)
    command = os.fork()
    if command == 0:
        os.setpgid(0, 0)
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environ)
        os._exit(as_python.run(words))
    ends = select.poll()
    ends.register(connection, 0)  # says so when nobody waits for the answer any more
    ends.register(ended := os.pidfd_open(command), select.POLLIN)
    if ended not in dict(ends.poll()):
        os.killpg(command, signal.SIGKILL)
        os._exit(0)
    _, status = os.waitpid(command, 0)
    code = os.waitstatus_to_exitcode(status)
    connection.sendall(str(code if code >= 0 else 128 - code).encode())
    os._exit(0)


def _import_all() -> None:
    """What commands would import for themselves, one after the other."""
    import matplotlib.pyplot  # noqa: F401
    import numba  # noqa: F401
    from ortools.sat.python import cp_model  # noqa: F401
    from transformers import GPT2LMHeadModel  # noqa: F401

    import pipeplan.cli.entry
    import pipeplan.compare
    import pipeplan.planner
    import pipeplan.report.page  # noqa: F401
    from tests import imports  # noqa: F401  the last one: it freezes the heap


if __name__ == "__main__":
    _import_all()
    _serve(socket.socket(fileno=int(sys.argv[1])))
