"""Signals as a wish to stop: repeats of one wish stop nothing else, a later one ends the rank."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from pipeplan.launch.stop_signal import StopSignal
from tests import forked_commands, launch_task

WAITS = """\
import os, sys, threading
from pipeplan.launch.stop_signal import StopSignal
with StopSignal(repeats_s=float(sys.argv[1])).listening():
    print("listens", flush=True)
    forked = os.fork()  # as workers that load data are
    if not forked:
        sys.stdin.read()
        os._exit(0)
    sys.stdin.read()
print("left", flush=True)
"""
"""A process that waits until its standard input ends, signals or not."""


@pytest.mark.parametrize("first", StopSignal.NAMES)
def test_repeats_are_the_same_wish(first: signal.Signals) -> None:
    """A supervisor's signal and torchrun's are one: the rank goes on and saves."""
    stop = StopSignal(repeats_s=600)
    before = [signal.getsignal(name) for name in StopSignal.NAMES]
    with stop.listening():
        assert not stop.wanted(0)
        os.kill(os.getpid(), first)
        assert stop.wanted(60)
        for name in StopSignal.NAMES:
            os.kill(os.getpid(), name)
        assert stop.number == first
    assert [signal.getsignal(name) for name in StopSignal.NAMES] == before


def test_who_waits_can_be_woken() -> None:
    """At once, and without a signal that was not there; the next wait is one."""
    stop = StopSignal()
    threading.Timer(0.05, stop.wake).start()
    begin = time.monotonic()
    assert not stop.wanted(60)
    assert time.monotonic() - begin < 30
    assert not stop.wanted(0)


@pytest.mark.parametrize("late", [True, False])
def test_a_late_signal_ends_the_rank(late: bool) -> None:
    """At once, whatever its main thread waits for; within the time for repeats it does not."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAITS, "0" if late else "600"],
        cwd=launch_task.ROOT,
        env=forked_commands.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "listens\n"
    process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    if late:
        assert process.wait(60) == 128 + signal.SIGINT
    process.stdin.close()
    assert process.stdout.read() == ("" if late else "left\n")
    assert process.wait(60) == (128 + signal.SIGINT if late else 0)
    process.stdout.close()
