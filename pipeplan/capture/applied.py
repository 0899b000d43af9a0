"""Applications of `torch.autograd.Function` that go somewhere else for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

Kind: TypeAlias = type[torch.autograd.Function]
Instead: TypeAlias = Callable[[Kind, Callable[..., Any], tuple[Any, ...]], Any]
"""The Function, its own application, arguments -> what the application returns instead."""


class Applied(nn.Module):
    """The application of a Function as a module."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, *arguments: Any) -> Any:
        """What the Function returns."""
        return self.kind.apply(*arguments)


@contextmanager
def applied(instead: Instead) -> Iterator[None]:
    """Inside, each application of a Function that Python defines is answered by `instead`."""
    usual: Any = torch.autograd.Function.__dict__["apply"]

    def answered(kind: Kind, *arguments: Any) -> Any:
        return instead(kind, usual.__get__(None, kind), arguments)

    torch.autograd.Function.apply = classmethod(answered)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = usual  # type: ignore[method-assign]
