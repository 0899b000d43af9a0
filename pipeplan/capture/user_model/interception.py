"""Calls that are intercepted for a while: of modules, whatever their class, and of Functions."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
"""Attributes in which a module keeps its hooks."""

OwnCall = Callable[..., Any]
"""The module's own call, with its hooks, checkpointing or compilation."""
InsteadOfCall = Callable[[str, OwnCall, tuple[Any, ...], dict[str, Any]], Any]
"""Name of a module, its own call, arguments -> what the call returns instead."""
FunctionKind: TypeAlias = type[torch.autograd.Function]
InsteadOfFunction: TypeAlias = Callable[[FunctionKind, Callable[..., Any], tuple[Any, ...]], Any]
"""The Function, its own application, arguments -> what the application returns instead."""


@contextmanager
def intercepted_calls(modules: Mapping[str, nn.Module], instead: InsteadOfCall) -> Iterator[None]:
    """Inside, each call of one of `modules` is answered by `instead`.

    What a class does around `forward` in a `__call__` of its own (checkpointing, compilation) and
    hooks belong to the module's own call, so they do not run around `instead`.

    Args:
        modules: by name; none lies inside another.
        instead: may make the module's own call, inside which the module is as it always is.
    """
    with ExitStack() as stack:
        for name, module in modules.items():
            stack.enter_context(_InterceptedModule(name, module, instead).taken())
        yield


class _InterceptedModule:
    """One module whose calls are answered by someone else."""

    def __init__(self, name: str, module: nn.Module, instead: InsteadOfCall) -> None:
        self._name, self._module, self._instead = name, module, instead
        self._own = type(module), {key: module.__dict__.get(key, _NONE) for key in _CALLS}
        kind, hookless = type(module), {key: OrderedDict[int, Any]() for key in HOOKS}
        plain = kind if kind.__call__ is nn.Module.__call__ else _plain(kind)
        self._other = plain, {**hookless, "forward": self._answer, "_compiled_call_impl": None}

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Inside, calls are answered by `instead`."""
        self._become(*self._other)
        try:
            yield
        finally:
            self._become(*self._own)

    def _become(self, kind: type[nn.Module], attributes: Mapping[str, Any]) -> None:
        """Bypasses `__setattr__`, which registers modules or forwards to an inner one."""
        object.__setattr__(self._module, "__class__", kind)
        for key, value in attributes.items():
            if value is _NONE:
                self._module.__dict__.pop(key, None)
            else:
                self._module.__dict__[key] = value

    def _answer(self, *arguments: Any, **named: Any) -> Any:
        return self._instead(self._name, self._real, arguments, named)

    def _real(self, *arguments: Any, **named: Any) -> Any:
        self._become(*self._own)
        try:
            return self._module(*arguments, **named)
        finally:
            self._become(*self._other)


_NONE = object()
_CALLS = (*HOOKS, "forward", "_compiled_call_impl")
"""Attributes of an instance that decide what its call does."""


def _plain(kind: type[nn.Module]) -> type[nn.Module]:
    """`kind` without a `__call__` of its own."""
    names = {"__call__": nn.Module.__call__, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), names)


class FunctionModule(nn.Module):
    """The application of a Function as a module."""

    def __init__(self, kind: FunctionKind) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, *arguments: Any) -> Any:
        """What the Function returns."""
        return self.kind.apply(*arguments)


_BASE: Any = torch.autograd.Function.__bases__[0]


@contextmanager
def intercepted_functions(instead: InsteadOfFunction) -> Iterator[None]:
    """Inside, each application of a Function that Python defines is answered by `instead`.

    `Function.apply` is left alone, which people bind to names of their own; all it does is to call
    the `apply` of its base, looked up anew each time.
    """

    def answered(kind: FunctionKind, *arguments: Any) -> Any:
        return instead(kind, super(_BASE, kind).apply, arguments)

    _BASE.apply = classmethod(answered)
    try:
        yield
    finally:
        del _BASE.apply
