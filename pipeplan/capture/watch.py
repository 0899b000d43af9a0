"""Watches a model run, and notes which module does what a graph of operations cannot hold."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeplan.capture.frames import is_machinery, place_of_line


@dataclass(frozen=True, slots=True)
class Opaque:
    """A module that a graph cannot hold."""

    reason: str
    """What it does, and where."""
    draws: bool = False
    """Whether it draws from Python's or numpy's generator."""
    counts: bool = False
    """Whether it changes its attributes: a checkpoint does not hold them."""


@dataclass
class Watch:
    """Notes who does what while a model runs."""

    names: Mapping[int, str]
    """Module by identity -> name."""
    found: dict[str, Opaque] = field(default_factory=dict)

    def note(self, name: str, reason: str, *, draws: bool = False, counts: bool = False) -> None:
        """Module `name` does what a graph cannot hold."""
        before = self.found.get(name, Opaque(reason))
        self.found[name] = Opaque(before.reason, before.draws or draws, before.counts or counts)

    def seen(self, what: str) -> None:
        """The module whose code is running now does `what`."""
        name, where = self._running()
        self.note(name, f"{what}{where}")

    def _running(self) -> tuple[str, str]:
        """The innermost module that runs, and the line that called what is watched."""
        frame = sys._getframe(2)  # noqa: SLF001
        where = ""
        while frame is not None:
            code = frame.f_code
            if not where and not is_machinery(code.co_filename):
                where = f" at {place_of_line(code.co_filename, frame.f_lineno)}"
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in self.names:
                return self.names[id(owner)], where
            frame = frame.f_back  # type: ignore[assignment]
        return "", where

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, calls that leave nothing in a graph are noted."""
        with ExitStack() as stack:
            for owner, name, what in _WATCHED:
                stack.enter_context(self._noting(owner, name, what))
            stack.enter_context(self._noting_functions())
            stack.enter_context(self._noting_draws())
            yield

    @contextmanager
    def _noting(self, owner: Any, name: str, what: str) -> Iterator[None]:
        usual = getattr(owner, name)

        def noted(*arguments: Any, **named: Any) -> Any:
            self.seen(what)
            return usual(*arguments, **named)

        setattr(owner, name, noted)
        try:
            yield
        finally:
            setattr(owner, name, usual)

    @contextmanager
    def _noting_functions(self) -> Iterator[None]:
        usual: Any = torch.autograd.Function.__dict__["apply"]

        def noted(kind: type, *arguments: Any, **named: Any) -> Any:
            self.seen(f"applies torch.autograd.Function {kind.__name__}")
            return usual.__func__(kind, *arguments, **named)

        torch.autograd.Function.apply = classmethod(noted)  # type: ignore[method-assign,assignment]
        try:
            yield
        finally:
            torch.autograd.Function.apply = usual  # type: ignore[method-assign]

    @contextmanager
    def _noting_draws(self) -> Iterator[None]:
        """Compares the state of Python's and numpy's generators where modules begin and end."""
        running: list[str] = []
        last = _generators()

        def turn() -> None:
            nonlocal last
            if last != (last := _generators()):
                self.note(
                    running[-1] if running else "",
                    "draws from Python's or numpy's generator",
                    draws=True,
                )

        def begin(module: nn.Module, _: Any) -> None:
            turn()
            running.append(self.names.get(id(module), running[-1] if running else ""))

        def end(_: nn.Module, __: Any, ___: Any) -> None:
            turn()
            running.pop()

        module = nn.modules.module
        hooks = (
            module.register_module_forward_pre_hook(begin),
            module.register_module_forward_hook(end, always_call=True),
        )
        try:
            yield
            turn()
        finally:
            for hook in hooks:
                hook.remove()


_WATCHED: tuple[tuple[Any, str, str], ...] = (
    (Tensor, "register_hook", "registers a hook of a tensor"),
    (Tensor, "register_post_accumulate_grad_hook", "registers a hook of a tensor"),
    (torch.autograd.graph.saved_tensors_hooks, "__enter__", "checkpoints or packs saved tensors"),
    (torch.autograd, "grad", "computes gradients"),
    (torch.autograd, "backward", "runs a backward"),
    (torch, "manual_seed", "seeds torch's generator"),
    (torch.random, "manual_seed", "seeds torch's generator"),
    (torch, "set_rng_state", "sets the state of torch's generator"),
    (torch.random, "set_rng_state", "sets the state of torch's generator"),
)
"""Owner, name, what a module does that calls it."""


def _generators() -> tuple[object, bytes]:
    name, keys, place, *rest = np.random.get_state(legacy=True)
    return (random.getstate(), name, place, *rest), np.asarray(keys).tobytes()
