"""The module that is handed out: the user's own, with another way to run its training forward."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipeplan.errors import InputError
from pipeplan.remat import Costs, Rematerialization
from pipeplan.rematerialized.precision import autocast
from pipeplan.rematerialized.script import Script
from pipeplan.rematerialized.steps import Pass, Prepared, Watch

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Parts:
    """What each call looks at, found once: to walk through a module takes as long as a layer."""

    modules: tuple[nn.Module, ...]
    """The module itself and its submodules."""
    parameters: tuple[nn.Parameter, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Parts:
        """Those of `module`."""
        return cls(tuple(module.modules()), tuple(module.parameters()))


@dataclass(frozen=True, slots=True)
class Conditions:
    """What the plan was made for; a call under others is refused."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: bool
    """Whether the input has one."""
    modes: tuple[bool, ...]
    """Per submodule: whether it trains."""
    trained: tuple[bool, ...]
    """Per parameter."""
    autocast: tuple[bool, torch.dtype]

    @classmethod
    def of(cls, parts: Parts, source: Tensor) -> Conditions:
        """Those of a call with `source` here and now."""
        return cls(
            tuple(source.shape),
            source.dtype,
            source.requires_grad,
            tuple(each.training for each in parts.modules),
            tuple(parameter.requires_grad for parameter in parts.parameters),
            autocast(source.device),
        )

    def check(self, now: Conditions) -> None:
        """Raises InputError where `now` differs."""
        what = {
            "input": (
                f"{now.dtype} of shape {list(now.shape)}",
                f"{self.dtype} of shape {list(self.shape)}",
            ),
            "requires_grad of the input": (now.gradient, self.gradient),
            "training modes of the submodules": (_sum(now.modes), _sum(self.modes)),
            "requires_grad of the parameters": (_sum(now.trained), _sum(self.trained)),
            "autocast": (now.autocast, self.autocast),
        }
        for name, (got, need) in what.items():
            if got != need:
                raise InputError(
                    f"rematerialized module: {name}: got {got}, need {need} as it was planned."
                    " Call rematerialize again for this, or leave the odd batch out."
                )


def _sum(flags: tuple[bool, ...]) -> str:
    """Short, and another one for other flags in all but odd cases: which ones are off."""
    off = [str(index) for index, flag in enumerate(flags) if not flag]
    return f"all on but {', '.join(off)}" if off else "all on"


class Rematerialized(nn.Module):
    """What a rematerialized module is beside its own class."""

    rematerialization: Rematerialization
    """The plan: schedule, method, and what the judge says of peak bytes and time."""
    rematerialization_costs: Costs
    """Of the plan's operations as they ran in its rehearsal; the last layer is the loss."""
    rematerialization_spread: float
    """Of whole calls in the rehearsal, between quartiles, as a share: noise of the plan's time."""
    _prepared: Prepared
    _conditions: Conditions
    _parts: Parts

    def forward(self, source: Tensor, *rest: Any, **options: Any) -> Any:
        """The module's output.

        Raises:
            InputError: if the call is unlike the one that was planned.
        """
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(source, *rest, **options)
        if rest or options:
            raise InputError(
                "rematerialized module: got several arguments, need one tensor as planned"
            )
        return run(self._parts, self._conditions, self._prepared, source)

    def run_as(self, script: Script, source: Tensor, watch: Watch) -> Tensor:
        """The output of a pass by another script, watched: to time operations again."""
        prepared = replace(self._prepared, script=script)
        return run(self._parts, self._conditions, prepared, source, watch)


def wrapped(
    module: Module,
    prepared: Prepared,
    plan: Rematerialization,
    costs: Costs,
    spread: float,
    conditions: Conditions,
) -> Module:
    """A shallow copy of `module`, of a class of its own, that shares all that `module` has."""
    kind = type(module)
    result = copy.copy(module)
    result.__class__ = type(f"Rematerialized{kind.__name__}", (Rematerialized, kind), {})
    for name, value in {
        "rematerialization": plan,
        "rematerialization_costs": costs,
        "rematerialization_spread": spread,
        "_prepared": prepared,
        "_conditions": conditions,
        "_parts": Parts.of(result),
    }.items():
        object.__setattr__(result, name, value)
    return result


def run(
    parts: Parts,
    conditions: Conditions,
    prepared: Prepared,
    source: Tensor,
    watch: Watch = nullcontext,
) -> Tensor:
    """The output of one pass, whose gradient starts the pass's backward.

    Two nodes: the first one of the backward only takes the gradient, so that autograd forgets it
    before the second one runs the layers.

    Raises:
        InputError: if the call is unlike the one that was planned.
    """
    conditions.check(Conditions.of(parts, source))
    now = Pass(prepared, source, watch)
    output = now.forward()
    link = _Link(now, parts.parameters)
    token = _Body.apply(link, _TRIGGER, source)  # type: ignore[no-untyped-call]
    result: Tensor = _Exit.apply(link, token, output)  # type: ignore[no-untyped-call]
    return result


_TRIGGER = torch.empty(0, requires_grad=True)


class _Link:
    """What the two nodes of a pass share; what was used is forgotten."""

    def __init__(self, now: Pass, parameters: Sequence[nn.Parameter]) -> None:
        self.now: Pass | None = now
        self.gradients: list[Tensor] = []
        self._parameters = parameters
        self._versions = self._seen()

    def _seen(self) -> list[int]:
        return [parameter._version for parameter in self._parameters]  # noqa: SLF001

    def backward(self) -> list[Tensor]:
        """Runs the pass's backward.

        Raises:
            InputError: if it has run already, or weights have changed since the forward.
        """
        now, self.now = self.now, None
        if now is None:
            raise InputError(
                "rematerialized module: got a second backward, need one per forward: what was"
                " kept is gone. Run the forward again."
            )
        if self._seen() != self._versions:
            raise InputError(
                "rematerialized module: weights changed between forward and backward, need the"
                " same to compute layers again. Update weights behind the backward."
            )
        return now.backward(self.gradients)


class _Body(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: _Link, trigger: Tensor, source: Tensor) -> Tensor:
        ctx.link, ctx.wanted = link, source.requires_grad
        return trigger.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.link.backward()
        return None, None, gradients[0] if ctx.wanted else None


class _Exit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: _Link, token: Tensor, output: Tensor) -> Tensor:
        ctx.link = link
        return output.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.link.gradients = [gradient]
        return None, gradient.new_empty(0), None
