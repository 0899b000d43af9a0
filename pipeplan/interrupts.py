"""Ctrl-C as every command ends on it: one line and 130.

Commands import everything else inside of it, or a key pressed meanwhile would show a traceback.
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

INTERRUPTED = 130


def exit_code_of(name: str, run: Callable[[], int], *, speaks: bool = True) -> int:
    """The exit code of `run`; 130 behind one line, if this process `speaks`, on Ctrl-C."""
    try:
        return run()
    except KeyboardInterrupt:
        if speaks:
            print(f"{name}: interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED


def is_first_rank() -> bool:
    """Whether this process speaks for all ranks: they all hear of Ctrl-C."""
    return os.environ.get("RANK", "0") == "0"


def leave(code: int) -> NoReturn:
    """End a rank once all is said, without tearing the interpreter down.

    Threads of torch may still let go of tensors behind the last message. Python ends a thread that
    asks for the interpreter while it is torn down; in the midst of C++ that aborts the process,
    and torchrun calls a finished run a failure. An interrupted rank runs no exit handlers either:
    they may wait for other ranks.
    """
    if code != INTERRUPTED:
        atexit._run_exitfuncs()  # noqa: SLF001  # the public way to it is the teardown
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed by whoever read it
            stream.flush()
    os._exit(code)
