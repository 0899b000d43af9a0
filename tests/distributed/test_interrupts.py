"""Ctrl-C where no verb listens yet: one line and 130, never Python's traceback, never a wait."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import forked_commands, launch_task

PRESS = """\
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started us behind
class Press:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Press())
sys.argv = ["", *{words!r}]
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""
"""A command during which Ctrl-C is pressed as soon as the module `name` is imported."""


def ended(code: str, **environ: str) -> tuple[int, str]:
    """(exit code, stderr) of Python code in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=launch_task.ROOT,
        env=forked_commands.environment() | environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("name", ["pipeplan.cli.entry", "argparse", "pydantic", "numpy"])
def test_while_the_command_imports(name: str) -> None:
    """From its first import on the command ends as it does later."""
    chain = str(launch_task.ROOT / "tests" / "golden" / "formats" / "chain.json")
    words = ["plan", chain, "--gpus", "1", "--memory", "1MiB", "--bandwidth", "inf", "-o", "-"]
    code = PRESS.format(name=name, module="pipeplan", words=words)
    assert ended(code) == (130, "pipeplan: interrupted\n")


@pytest.mark.parametrize("name", ["pipeplan.launch.options", "pydantic", "torch"])
def test_while_launch_imports(name: str, tmp_path: Path) -> None:
    """Rank 0 says so, the others only end."""
    plan = tmp_path / "plan.json"
    plan.write_text(launch_task.plan(2, "flush").to_json())
    words = ["--plan", str(plan), "--clock", "virtual"]
    code = PRESS.format(name=name, module="pipeplan.launch", words=words)
    for rank, said in (("0", "launch: interrupted\n"), ("1", "")):
        assert ended(code, RANK=rank, WORLD_SIZE="2") == (130, said)


@pytest.mark.parametrize("name", ["argparse", "pydantic", "torch"])
def test_while_calibrate_imports(name: str, tmp_path: Path) -> None:
    """What measures machines ends alike."""
    words = ["--memory", "1GiB", "-o", str(tmp_path / "cluster.json")]
    code = PRESS.format(name=name, module="pipeplan.calibrate", words=words)
    assert ended(code) == (130, "calibrate: interrupted\n")


@pytest.mark.parametrize(
    ("environ", "file", "said"),
    [
        ({"WORLD_SIZE": "two"}, "cluster.json", "environment: WORLD_SIZE: got 'two', need an"),
        ({}, "nowhere/cluster.json", "need a file in a folder that can be written to"),
        ({}, "", "exists and is not overwritten"),
    ],
)
def test_calibrate_refuses_before_it_measures(
    environ: dict[str, str], file: str, said: str, tmp_path: Path
) -> None:
    """An environment of words, and a file that could not be written at the end."""
    words = ["-m", "pipeplan.calibrate", "--memory", "1GiB", "-o", str(tmp_path / file)]
    done = subprocess.run(
        [sys.executable, *words],
        cwd=launch_task.ROOT,
        env=forked_commands.environment() | environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert said in done.stderr


def test_while_ranks_join(tmp_path: Path) -> None:
    """A rank that waits for one that never comes is not waited for until the timeout."""
    plan = tmp_path / "plan.json"
    plan.write_text(launch_task.plan(2, "flush").to_json())
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    process = subprocess.Popen(
        [sys.executable, "-m", "pipeplan.launch", "--plan", plan, "--clock", "virtual"],
        cwd=launch_task.ROOT,
        env=forked_commands.environment() | place,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 90
    while not listens(port):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.5)  # it waits for rank 1 now
    os.kill(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert (process.returncode, said) == (130, "launch: interrupted\n")


def listens(port: int) -> bool:
    """Whether rank 0 has opened its store."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
