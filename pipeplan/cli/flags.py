"""What Python calls its arguments, as the flags that set them; flags that mean nothing.

The library's messages name what is given from Python (`config.pins`, `budget=`). Who typed a
command reads the flags instead; this is the one place that knows both.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Final

from pipeplan.errors import InputError, PipeplanError

_NAMED_APART: Final = {"pins": "pin", "time_limit_s": "time-limit"}
"""Fields of `Config` whose flag has another name."""
_REMAT: Final = {
    "budget=": "--budget ",
    "method=": "--method ",
    "channel=HostLink(...)": "--host-bandwidth",
}


@contextmanager
def errors_as_flags(as_flags: Callable[[str], str]) -> Iterator[None]:
    """Errors inside leave with their message through `as_flags`; also a decorator."""
    try:
        yield
    except PipeplanError as error:
        error.args = (as_flags(str(error)), *error.args[1:])
        raise


def of_config(message: str) -> str:
    """Fields of `planner.Config` as flags of `plan` and `compare`; names of files stay."""
    from pipeplan.planner import Config

    names = "|".join(field.name for field in fields(Config))
    named = rf"(?<![\w/.-])config\.({names})\b(?![./]\w)"
    return re.sub(named, lambda found: _flag(found[1]), message)


def refuse(args: argparse.Namespace, names: Iterable[str], why: str) -> None:
    """Refuse flags that mean nothing beside what else is asked for.

    Args:
        args: None where a flag is not given.
        names: as `args` has them.
        why: behind the flag, in the message.

    Raises:
        InputError: names the first that is given.
    """
    for name in names:
        if getattr(args, name) is not None:
            raise InputError(f"{_flag(name)}: {why}")


def _flag(field: str) -> str:
    return "--" + _NAMED_APART.get(field, field.replace("_", "-"))


def of_remat(message: str) -> str:
    """Arguments of `remat.rematerialize_chain` as flags of `remat`."""
    for name, flag in _REMAT.items():
        message = message.replace(f" {name}", f" {flag}")
    return message
