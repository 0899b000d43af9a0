"""How a rank's process ends: exit handlers and buffers yes, the interpreter's teardown no."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import atexit, sys
from pipeplan import interrupts

class Kept:
    def __del__(self):
        print("torn down")

sys.kept = Kept()
atexit.register(print, "exit handler")
print("last words")
interrupts.leave(int(sys.argv[1]))
"""


def ended(code: int) -> tuple[int, list[str]]:
    """The exit code, and what is printed."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(code)], capture_output=True, text=True, check=False
    )
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


def test_a_rank_ends_without_tearing_the_interpreter_down() -> None:
    """Its code is passed on, what it printed comes out, and its exit handlers run."""
    for code in (0, 3):
        assert ended(code) == (code, ["last words", "exit handler"])


def test_an_interrupted_rank_waits_for_no_handler() -> None:
    """What it printed comes out all the same."""
    assert ended(130) == (130, ["last words"])
