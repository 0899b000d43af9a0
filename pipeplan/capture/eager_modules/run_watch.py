"""Watches one run of a model: which module does what a graph of operations cannot hold."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from pipeplan.capture.user_model.interception import FunctionKind, intercepted_functions
from pipeplan.capture.user_model.user_code import running_module


@dataclass(frozen=True, slots=True)
class OpaqueModule:
    """A module that a graph cannot hold."""

    reason: str
    """What it does, and where."""
    draws: bool = False
    """Whether it draws from Python's or numpy's generator."""
    counts: bool = False
    """Whether it changes its attributes: a checkpoint does not hold them."""
    applies: bool = False
    """Whether all it does is to apply Functions, each of which can be kept by itself."""


@dataclass
class RunWatch:
    """Notes who does what while a model runs."""

    names: Mapping[int, str]
    """Of the model's modules."""
    found: dict[str, OpaqueModule] = field(default_factory=dict)

    def note(
        self,
        name: str,
        reason: str,
        *,
        draws: bool = False,
        counts: bool = False,
        applies: bool = False,
    ) -> None:
        """Module `name` does what a graph cannot hold."""
        before = self.found.get(name, OpaqueModule(reason, applies=True))
        self.found[name] = OpaqueModule(
            reason if before.applies and not applies else before.reason,
            before.draws or draws,
            before.counts or counts,
            before.applies and applies,
        )

    def seen(self, what: str, *, applies: bool = False) -> None:
        """The module whose code is running now does `what`."""
        name, where = running_module(self.names)
        self.note(name, f"{what}{where}", applies=applies)

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
        def noted(
            kind: FunctionKind, usual: Callable[..., Any], arguments: tuple[Any, ...]
        ) -> Any:
            self.seen(f"applies torch.autograd.Function {kind.__name__}", applies=True)
            return usual(*arguments)

        with intercepted_functions(noted):
            yield

    @contextmanager
    def _noting_draws(self) -> Iterator[None]:
        """Compares the state of Python's and numpy's generators where modules begin and end."""
        inside: list[str] = []
        last = _generators()

        def turn() -> None:
            nonlocal last
            if last != (last := _generators()):
                self.note(
                    inside[-1] if inside else "",
                    "draws from Python's or numpy's generator",
                    draws=True,
                )

        def begin(module: nn.Module, _: Any) -> None:
            turn()
            inside.append(self.names.get(id(module.__dict__), inside[-1] if inside else ""))

        def end(_: nn.Module, __: Any, ___: Any) -> None:
            turn()
            inside.pop()

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
    (
        torch.autograd.graph.saved_tensors_hooks,
        "__enter__",
        "checkpoints (plan --recompute auto decides that itself) or packs saved tensors",
    ),
    # Behind `grad` and `backward`, which people bind to names of their own.
    (torch.autograd, "_engine_run_backward", "computes gradients"),
    (torch, "manual_seed", "seeds torch's generator"),
    (torch.random, "manual_seed", "seeds torch's generator"),
    (torch, "set_rng_state", "sets the state of torch's generator"),
    (torch.random, "set_rng_state", "sets the state of torch's generator"),
)
"""Owner, name, what a module does that calls it."""


def _generators() -> tuple[object, bytes]:
    name, keys, place, *rest = np.random.get_state(legacy=True)
    return (random.getstate(), name, place, *rest), np.asarray(keys).tobytes()
