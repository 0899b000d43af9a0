"""Ctrl-C as every command ends on it: one line and 130.

Commands import everything else inside of it, or a key pressed meanwhile would show a traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

INTERRUPTED = 130


def told(name: str, run: Callable[[], int], *, speaks: bool = True) -> int:
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
    """End a rank; an interrupted one at once, for threads of torch may still wait for others."""
    if code == INTERRUPTED:
        os._exit(code)
    sys.exit(code)
