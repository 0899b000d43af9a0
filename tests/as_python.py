"""What `python WORDS..` does, in a process that is forked instead of started."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path


def run(words: Sequence[str]) -> int:
    """Run `-c TEXT`, `-m MODULE` or a script with the words behind it.

    Returns:
        The exit code, once all that was printed is written.
    """
    kind, *rest = words
    code: object = None
    try:
        if kind == "-c":
            sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
        elif kind == "-m":
            sys.argv, sys.path[0] = rest, os.getcwd()
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = [*words], str(Path(kind).parent.absolute())
            runpy.run_path(kind, run_name="__main__")
    except SystemExit as ended:
        code = ended.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code if isinstance(code, int) else 0
