"""What a task trains with beside its model and its data: two runs compare it, in words.

A run that goes on may train otherwise on purpose, with another rate for instance. So what differs
is told, not refused.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from functools import partial
from types import CodeType, FunctionType
from typing import Any, Final

from torch import nn

from pipeplan.task import Task
from pipeplan.units import shown

_DIGITS: Final = 8
"""Of the digest of a function's code that people are shown."""
_FUNCTIONS: Final = ("loss", "optimizer", "scheduler")
_VALUES: Final = ("clip_norm", "loss_scale", "autocast", "accumulate", "master_weights")


def recipe(task: Task) -> dict[str, str]:
    """By field of the task, what it has there; two that differ are written differently."""
    found = {name: _described(getattr(task, name)) for name in _FUNCTIONS}
    return found | {name: shown(getattr(task, name)) for name in _VALUES}


def differences(stored: Mapping[str, str], own: Mapping[str, str]) -> list[str]:
    """A remark for each field that a checkpoint was trained with otherwise.

    Args:
        stored: what the checkpoint has; fields that it lacks are not compared.
        own: of the run that goes on from it.
    """
    return [
        f"goes on with another {name}: the checkpoint was trained with {stored[name]}, this run"
        f" has {own[name]}"
        for name in own
        if name in stored and stored[name] != own[name]
    ]


def _described(function: Any) -> str:
    """A function by its name and a digest of its code, others as they show themselves."""
    if isinstance(function, partial):
        given = [*map(shown, function.args)]
        given += [f"{name}={shown(value)}" for name, value in function.keywords.items()]
        return f"{_described(function.func)}({', '.join(given)})"
    if isinstance(function, FunctionType):
        digest = hashlib.sha256(_code(function.__code__).encode()).hexdigest()
        python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
        return f"{function.__qualname__} (code {digest[:_DIGITS]}, {python})"
    if isinstance(function, type):
        return function.__qualname__
    if function is None or isinstance(function, nn.Module):
        return shown(function)
    return type(function).__qualname__


def _code(code: CodeType) -> str:
    """What a function does, but for where it is written and what it calls."""
    return f"{code.co_code.hex()} {code.co_names} {[*map(_constant, code.co_consts)]}"


def _constant(value: object) -> str:
    """A constant of a function; sets have no order of their own."""
    if isinstance(value, CodeType):
        return _code(value)
    return f"frozenset {sorted(map(repr, value))}" if isinstance(value, frozenset) else repr(value)
