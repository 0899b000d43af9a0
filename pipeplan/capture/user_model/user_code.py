"""Where in the user's code a model is: the module that runs and the line, for messages."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn


def place_of_line(file: str, line: int) -> str:
    """`model.py:12`."""
    return f"{file.rpartition('/')[2]}:{line}"


def place_of(error: BaseException) -> str:
    """` at file.py:12 (code)` of the innermost frame outside of torch; empty if there is none."""
    frames = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    users = [frame for frame in frames if not is_machinery(frame[0])]
    if not users:
        return ""
    file, line, name = users[-1]
    return f" at {place_of_line(file, line)} ({name})"


def is_under(error: BaseException, folder: str) -> bool:
    """Whether `error` came through code of `folder`."""
    trace = error.__traceback__
    while trace is not None:
        if folder in trace.tb_frame.f_code.co_filename:
            return True
        trace = trace.tb_next
    return False


def is_machinery(file: str) -> bool:
    """Whether `file` is torch's or ours, so that no user looks there."""
    return bool(re.search(_MACHINERY, file))


def names_by_identity(model: nn.Module) -> dict[int, str]:
    """Names of modules by identity of their attributes, which stand-ins of an export share."""
    return {id(module.__dict__): name for name, module in model.named_modules()}


def module_of_frame(frame: Any, names: Mapping[int, str]) -> str | None:
    """The name of the module that is called, or whose user's code runs, in `frame`; else None.

    torch's other methods are not the module's doing: in `self.part.to(dtype)` the caller acts.
    """
    code, owner = frame.f_code, frame.f_locals.get("self")
    if is_machinery(code.co_filename) and code.co_name not in ("forward", "_call_impl"):
        return None
    return names.get(id(owner.__dict__)) if isinstance(owner, nn.Module) else None


def running_module(names: Mapping[int, str]) -> tuple[str, str]:
    """The innermost of the modules `names` whose code runs now, and the user's line in it.

    ('', line) where none of them does.
    """
    frame: Any = sys._getframe(1)  # noqa: SLF001
    where = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not where and not is_machinery(file):
            where = f" at {place_of_line(file, frame.f_lineno)}"
        if (name := module_of_frame(frame, names)) is not None:
            return name, where
        frame = frame.f_back
    return "", where


_MACHINERY = r"/torch/|/sympy/|/contextlib\.py$|/pipeplan/(capture/|nested\.py$)|^<"
