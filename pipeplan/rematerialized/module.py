"""The module that is handed out: the user's own, with another way to run its training forward."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pipeplan.autograd_pass import tied_to_backward
from pipeplan.errors import InputError
from pipeplan.remat import Costs, Rematerialization
from pipeplan.rematerialized.conditions import Conditions
from pipeplan.rematerialized.parts import Parts
from pipeplan.rematerialized.script import Script
from pipeplan.rematerialized.steps import Pass, Prepared, Watch

Module = TypeVar("Module", bound=nn.Module)


class Rematerialized(nn.Module):
    """What a rematerialized module is beside its own class."""

    rematerialization: Rematerialization
    """The plan: schedule, method, and what the judge says of peak bytes and time."""
    rematerialization_costs: Costs
    """Of the plan's operations as they ran in its rehearsal; the last layer is the loss."""
    rematerialization_spread: float | None
    """Of whole calls in the rehearsal, between quartiles, as a share: noise of the plan's time.

    None where there was only one.
    """
    _prepared: Prepared
    _conditions: Conditions
    _parts: Parts

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """The module's output.

        Raises:
            InputError: if the call is unlike the one that was planned.
        """
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*inputs, **options)
        if options or len(inputs) != 1 or not isinstance(inputs[0], Tensor):
            kinds = [type(value).__name__ for value in inputs] + [f"{name}=" for name in options]
            raise InputError(
                f"rematerialized module: got ({', '.join(kinds)}), need one tensor as planned."
                " Call rematerialize on a module that takes one."
            )
        return run(self._parts, self._conditions, self._prepared, inputs[0])

    def run_as(self, script: Script, source: Tensor, watch: Watch) -> Tensor:
        """The output of a pass by another script, watched: to time operations again."""
        prepared = replace(self._prepared, script=script)
        return run(self._parts, self._conditions, prepared, source, watch)


def wrapped(
    module: Module,
    prepared: Prepared,
    plan: Rematerialization,
    costs: Costs,
    spread: float | None,
    parts: Parts,
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
        "_parts": parts,
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

    Raises:
        InputError: if the call is unlike the one that was planned.
    """
    conditions.check(Conditions.of(parts, source))
    parts.check()
    if source.is_inference():
        raise InputError(
            "rematerialized module: input: got a tensor of inference mode, need one that can be"
            " trained with. Clone it outside of inference mode."
        )
    now = Pass(prepared, source, watch)
    output = now.forward()
    (result,) = tied_to_backward(_Link(now, parts, source), [source], [output])
    return result


class _Link:
    """A pass and the gradient that starts its backward; what was used is forgotten."""

    def __init__(self, now: Pass, parts: Parts, source: Tensor) -> None:
        self.now: Pass | None = now
        self.gradients: list[Tensor | None] = []
        self._wanted = source.requires_grad
        self._parts = parts
        self._before = self._versions(now)

    def _versions(self, now: Pass) -> dict[str, list[tuple[int, int]]]:
        """What layers read when they run again."""
        weights = [(id(each), each._version) for each in self._parts.fixed]  # noqa: SLF001
        return {"weights": weights, **now.versions()}

    def backward(self) -> list[Tensor | None]:
        """Runs the pass's backward; the gradient of the input, None where it has none.

        Raises:
            InputError: if it has run already, or weights, the input or buffers that no
                forward changes have changed since the forward.
        """
        now, self.now = self.now, None
        if now is None:
            raise InputError(
                "rematerialized module: got a second backward, need one per forward: what was"
                " kept is gone. Run the forward again."
            )
        self._parts.check()
        for name, versions in self._versions(now).items():
            if versions != self._before[name]:
                raise InputError(
                    f"rematerialized module: {name} changed between forward and backward, need the"
                    f" same to compute layers again. Update the {name} behind the backward."
                )
        found = now.backward(self.gradients)
        return [found[0] if self._wanted else None]
