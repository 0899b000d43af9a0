"""What a task trains with beside its model and its data: two runs compare it, in words.

A run that goes on may train otherwise on purpose, with another rate for instance. So what differs
is told, not refused.
"""

from __future__ import annotations

import hashlib
import inspect
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from types import CodeType, FunctionType, MethodType
from typing import Any, Final

import torch
from torch import nn

from pipeplan.task import Task

_DIGITS: Final = 8
"""Of the digest of a function's code that people are shown."""
_SHOWN: Final = 160
"""Characters of a description that people are shown."""
_DEPTH: Final = 3
"""Objects in objects that are described by more than their types."""
_EXACT: Final = 2**53
"""From here on floats are no integers' equals."""
_FIELDS: Final = (
    "loss", "optimizer", "scheduler", "clip_norm", "loss_scale", "autocast", "accumulate",
    "master_weights",
)  # fmt: skip


def recipe(task: Task) -> dict[str, str]:
    """By field of the task, what it has there.

    Functions are described by their names, defaults and code, objects by their types and plain
    attributes: neither by what they hold from outside, nor by the values of tensors.
    """
    return {name: _described(getattr(task, name)) for name in _FIELDS}


def differences(stored: Mapping[str, str], own: Mapping[str, str]) -> list[str]:
    """A remark for each field that a checkpoint was trained with otherwise.

    Args:
        stored: what the checkpoint has; fields that it lacks are not compared.
        own: of the run that goes on from it.
    """
    return [
        f"goes on with another {name}: the checkpoint was trained with {_short(stored[name])},"
        f" this run has {_short(own[name])}"
        for name in own
        if name in stored and stored[name] != own[name]
    ]


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _described(value: Any, depth: int = 0) -> str:
    """A value in words that are the same in each process."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:.17g}" if abs(value) < _EXACT else repr(value)
    if value is None or isinstance(value, str | bytes | bool | complex | torch.dtype):
        return repr(value)
    if isinstance(value, FunctionType):
        return _function(inspect.unwrap(value), depth)
    if callable(value) and hasattr(value, "__name__") and not isinstance(value, MethodType):
        return _name(value)  # classes, functions of C
    if depth == _DEPTH:
        return _name(type(value))
    if isinstance(value, tuple | list):
        return f"({', '.join(_described(each, depth + 1) for each in value)})"
    if isinstance(value, dict):
        return f"{{{', '.join(_named(value, depth))}}}"
    if isinstance(value, partial):
        given = [_described(each, depth + 1) for each in value.args]
        given += _named(value.keywords, depth)
        return f"{_described(value.func, depth + 1)}({', '.join(given)})"
    if isinstance(value, MethodType):
        return f"{_described(value.__func__, depth)} of {_described(value.__self__, depth)}"
    return f"{_name(type(value))}({', '.join(_named(_attributes(value), depth))})"


def _function(function: Any, depth: int) -> str:
    if not isinstance(function, FunctionType):
        return _described(function, depth)
    if _package(function) == "torch":
        return _name(function)  # releases change the code, not what it does
    digest = hashlib.sha256(_code(function.__code__, function.__doc__).encode()).hexdigest()
    python = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    described = f"{function.__qualname__} (code {digest[:_DIGITS]}, {python})"
    defaults = [_described(each, depth + 1) for each in function.__defaults__ or ()]
    defaults += _named(function.__kwdefaults__ or {}, depth)
    return f"{described} with {', '.join(defaults)}" if defaults and depth < _DEPTH else described


def _name(named: Any) -> str:
    """Of a class or function; those of torch and Python by their last name."""
    name = getattr(named, "__qualname__", named.__name__)
    known = _package(named) in ("", "torch", "builtins", "pipeplan")
    return name if known else f"{named.__module__}.{name}"


def _package(named: Any) -> str:
    """Where a class or function is from; nothing where it does not say, as some made by `exec`."""
    return (getattr(named, "__module__", None) or "").partition(".")[0]


def _named(values: Mapping[Any, Any], depth: int) -> list[str]:
    return [f"{name}={_described(each, depth + 1)}" for name, each in values.items()]


def _attributes(value: Any) -> dict[str, Any]:
    """Plain attributes of an object, and the modules in it."""
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    held = dict(getattr(value, "__dict__", {}))
    if isinstance(value, nn.Module):
        held = {name: each for name, each in held.items() if name != "training"}
        held |= dict(value.named_children())
    return {
        name: each
        for name, each in held.items()
        if not name.startswith("_") and not isinstance(each, torch.Tensor)
    }


def _code(code: CodeType, documentation: str | None = None) -> str:
    """What a function does, but for where it is written, what it says and what it calls."""
    constants = [each for each in code.co_consts if each is None or each != documentation]
    return f"{code.co_code.hex()} {code.co_names} {[*map(_constant, constants)]}"


def _constant(value: object) -> str:
    """A constant of a function; sets have no order of their own."""
    if isinstance(value, CodeType):
        return _code(value)
    return f"frozenset {sorted(map(repr, value))}" if isinstance(value, frozenset) else repr(value)
