"""Parse, run one verb, turn every outcome into one message and one exit code."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Sequence

from pipeplan import __version__
from pipeplan.cli import (
    calibrate,
    compare,
    convert,
    export,
    helptext,
    plan,
    profile,
    remat,
    report,
    show,
    simulate,
    verify,
)
from pipeplan.errors import PipeplanError
from pipeplan.flags import FlagParser
from pipeplan.heap import give_back_large_blocks
from pipeplan.taskref import error_line

_VERBS = (
    profile,
    convert,
    calibrate,
    plan,
    compare,
    remat,
    show,
    verify,
    simulate,
    export,
    report,
)

_INTERNAL = 1
_USAGE = 2

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Why stdout takes no more; files of ours say so themselves."""
_EXTRAS = {"ortools": "plan", "matplotlib": "plan", "torch": "run", "transformers": "models"}
"""What is installed only where it is needed, and the extra that brings it."""

_DESCRIPTION = """\
Plan and run pipeline-parallel training: the shortest period under exact memory.

  profile or import  ->  chain.json (show)  ->  plan  ->  plan.json  ->  show, verify, simulate
  torchrun --nproc-per-node P -m pipeplan.launch --plan plan.json --out RUN  ->  report RUN
"""

_CODES = """\
exit codes: 0 done, 1 internal error, 2 bad usage or input, 3 proven infeasible,
4 invalid plan, 5 no plan found, none ruled out. Results go to stdout, progress to stderr."""


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="pipeplan",
        description=_DESCRIPTION,
        epilog=_CODES,
        formatter_class=helptext.Formatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"pipeplan {__version__}")
    verbs = top.add_subparsers(
        title="verbs", metavar="VERB", required=True, parser_class=FlagParser
    )
    for module in _VERBS:
        module.add(verbs)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit code."""
    args = parser().parse_args(argv)
    if argv is None and args.run is profile.run:  # the process is this command's alone
        give_back_large_blocks(os.environ)  # as a run does, whose times it measures
    try:
        code: int = args.run(args)
        print(end="", flush=True)  # nothing where stdout is closed
    except PipeplanError as error:
        print(f"pipeplan: {error}", file=sys.stderr)
        return error.exit_code
    except SystemExit as error:  # its code would be taken for ours
        print(f"pipeplan: the task's code has exited: {error_line(error)}", file=sys.stderr)
        return _USAGE
    except BrokenPipeError:
        _drop_output()  # the reader (`| head`) has seen enough
        return 0
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            _drop_output()
            print(f"pipeplan: stdout: cannot be written: {error.strerror}.", file=sys.stderr)
            return _USAGE
        if args.debug:
            raise
        if isinstance(error, ModuleNotFoundError) and (error.name or "") in _EXTRAS:
            return _missing(error.name or "")
        kind = type(error).__name__
        print(
            f"pipeplan: {kind}: {error}. This is a bug of pipeplan;"
            " please report it with the output of the same command and --debug.",
            file=sys.stderr,
        )
        return _INTERNAL
    return code


def _drop_output() -> None:
    """Send what is still to be printed nowhere, so that Python does not complain at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _missing(package: str) -> int:
    print(
        f"pipeplan: this verb needs {package}, which is not installed."
        f" Run pip install 'pipeplan[{_EXTRAS[package]}]'.",
        file=sys.stderr,
    )
    return _USAGE
