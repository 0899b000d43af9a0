"""The module that is handed out: the user's own, with a training forward that runs a program."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from pipeplan.device_program import DeviceProgram
from pipeplan.errors import InputError
from pipeplan.operators.captured import Captured
from pipeplan.operators.executor import Pass
from pipeplan.operators.flat_module import Arguments
from pipeplan.operators.prepared import Prepared
from pipeplan.precision import around

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class Slot:
    """Where a parameter or buffer is found: it may be replaced."""

    name: str
    register: dict[str, Any]
    own: str


@dataclass(frozen=True)
class Plan:
    """A prepared program, and where the module's tensors are."""

    prepared: Prepared
    slots: tuple[Slot, ...]
    parts: tuple[nn.Module, ...]
    """Submodules, the module itself left out."""

    @classmethod
    def of(cls, module: nn.Module, prepared: Prepared) -> Plan:
        """For `module`, which was captured."""
        names = {**prepared.captured.parameters, **prepared.captured.buffers}
        slots = []
        for path in names:
            owner, _, own = path.rpartition(".")
            part = module.get_submodule(owner)
            register = part._parameters if own in part._parameters else part._buffers  # noqa: SLF001
            slots.append(Slot(path, register, own))
        return cls(prepared, tuple(slots), tuple(p for p in module.modules() if p is not module))

    def states(self) -> dict[str, Tensor]:
        """Parameters and buffers as they are now."""
        return {slot.name: slot.register[slot.own] for slot in self.slots}


class ByOperators(nn.Module):
    """What a module that runs a device program is beside its own class."""

    operator_plan: Plan

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's output.

        Raises:
            InputError: if the call is unlike the one that was captured.
        """
        if not (self.training and torch.is_grad_enabled()):
            return super().forward(*args, **kwargs)
        return run(self.operator_plan, args, kwargs)


def by_operators(module: Module, captured: Captured, program: DeviceProgram) -> Module:
    """`module` in a form whose training forward and backward run `program`.

    The result shares all that `module` has. Gradients are added to `.grad` by the backward;
    `torch.autograd.grad` finds none for parameters. What hooks of submodules did with tensors when
    the call was captured is in the graph; what else they did is not done again.

    Args:
        module: as it was captured.
        captured: of a call of `module`; later calls must be alike in all but values.
        program: one that the judge allows.

    Raises:
        InputError: if `program` breaks a rule.
    """
    kind = type(module)
    result = copy.copy(module)
    result.__class__ = type(f"{kind.__name__}ByOperators", (ByOperators, kind), {})
    # The sample is not to live as long as the module.
    kept = replace(captured, arguments=captured.arguments.without_tensors())
    plan = Plan.of(module, Prepared(kept, program))
    object.__setattr__(result, "operator_plan", plan)
    return result


def run(plan: Plan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the module returns, whose gradients start the pass's backward.

    Two nodes: the first one of the backward only takes the gradients, so that autograd forgets
    them before the second one runs the program.
    """
    captured = plan.prepared.captured
    given = Arguments(args, kwargs)
    states = plan.states()
    _check(plan, given)
    now = Pass(plan.prepared, states, given.tensors)
    outputs = now.forward()
    if not any(value is not None for value in captured.tangents):
        return captured.form.filled(tuple(outputs))
    link = _Link(now, states, given.tensors)
    token = _Body.apply(link, _TRIGGER, *given.tensors)  # type: ignore[no-untyped-call]
    fixed = tuple(value is None for value in captured.tangents)
    results = _Exit.apply(link, fixed, token, *outputs)  # type: ignore[no-untyped-call]
    outputs.clear()
    return captured.form.filled(results)


def _check(plan: Plan, given: Arguments) -> None:
    captured = plan.prepared.captured
    planned = captured.arguments
    if not planned.same_form(given):
        raise _unlike("arguments", "others", "those of the captured call, tensors apart")
    for place, (now, then) in enumerate(zip(given.facts, planned.facts, strict=True)):
        if now != then:
            raise _unlike(f"input {place}", now, then)
    cast = around(captured.device)
    if cast != captured.cast:
        raise _unlike("autocast", cast, captured.cast)
    modes = (True, *(part.training for part in plan.parts))
    if modes != captured.training:
        raise _unlike("training modes of submodules", "others", "those of the captured call")


def _unlike(what: str, got: object, need: object) -> InputError:
    return InputError(
        f"module by operators: {what}: got {got}, need {need} as captured. Capture and plan this"
        " call, or leave it out."
    )


_TRIGGER = torch.empty(0, requires_grad=True)


class _Link:
    """What the two nodes of a pass share; what was used is forgotten."""

    def __init__(self, now: Pass, states: dict[str, Tensor], inputs: list[Tensor]) -> None:
        self.now: Pass | None = now
        self.gradients: list[Tensor | None] = []
        self._read = [each for each in states.values() if isinstance(each, nn.Parameter)]
        self._inputs = [each.detach() for each in inputs]
        self._before = self._versions()

    def _versions(self) -> list[int]:
        """How often what is read again has been written to, by torch's count."""
        return [each._version for each in (*self._read, *self._inputs)]  # noqa: SLF001

    def backward(self) -> list[Tensor | None]:
        """Runs the pass's backward.

        Raises:
            InputError: if it has run already, or weights or inputs changed since the forward.
        """
        now, self.now = self.now, None
        if now is None:
            raise InputError(
                "module by operators: got a second backward, need one per forward: what was kept"
                " is gone. Run the forward again."
            )
        if self._versions() != self._before:
            raise InputError(
                "module by operators: weights or inputs changed between forward and backward, need"
                " the same. Update them behind the backward."
            )
        return now.backward(self.gradients)


class _Body(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, link: _Link, trigger: Tensor, *inputs: Tensor) -> Tensor:
        ctx.link = link
        return trigger.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.link.backward())


class _Exit(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, link: _Link, fixed: tuple[bool, ...], token: Tensor, *outputs: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.link = link
        ctx.set_materialize_grads(False)
        results = tuple(output.detach() for output in outputs)
        pairs = zip(results, fixed, strict=True)
        ctx.mark_non_differentiable(*(result for result, is_fixed in pairs if is_fixed))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.link.gradients = list(gradients)
        return (None, None, _TRIGGER.new_empty(0), *(None for _ in gradients))
