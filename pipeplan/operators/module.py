"""The module that is handed out: the user's own, with a training forward that runs a program."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pipeplan.autograd_pass import tied_to_backward
from pipeplan.device_program import DeviceProgram
from pipeplan.errors import InputError
from pipeplan.operators.captured import Captured
from pipeplan.operators.executor import ProgramPass
from pipeplan.operators.flat_module import Arguments, is_hooked
from pipeplan.operators.prepared import PreparedProgram
from pipeplan.precision import around

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class RegisteredTensor:
    """Where a parameter or buffer is found: it may be replaced."""

    name: str
    register: dict[str, Any]
    own: str


@dataclass(frozen=True)
class BoundProgram:
    """A prepared program, and where the module's tensors are."""

    prepared: PreparedProgram
    slots: tuple[RegisteredTensor, ...]
    parts: tuple[nn.Module, ...]
    """Submodules, the module itself left out."""
    trained: tuple[bool, ...]
    """Per slot: whether it required a gradient."""
    hooks: int
    """Of submodules: what they did with tensors is in the graph."""

    @classmethod
    def of(cls, module: nn.Module, prepared: PreparedProgram) -> BoundProgram:
        """For `module`, which was captured."""
        names = {**prepared.captured.parameters, **prepared.captured.buffers}
        slots = []
        for path in names:
            owner, _, own = path.rpartition(".")
            part = module.get_submodule(owner)
            register = part._parameters if own in part._parameters else part._buffers  # noqa: SLF001
            slots.append(RegisteredTensor(path, register, own))
        parts = tuple(part for part in module.modules() if part is not module)
        trained = tuple(slot.register[slot.own].requires_grad for slot in slots)
        return cls(prepared, tuple(slots), parts, trained, _hooks(parts))

    def states(self) -> dict[str, Tensor]:
        """Parameters and buffers as they are now."""
        return {slot.name: slot.register[slot.own] for slot in self.slots}


def _hooks(parts: Sequence[nn.Module]) -> int:
    """How many are on calls of `parts`."""
    return sum(
        len(part._forward_hooks)  # noqa: SLF001 - torch has no public name for any of them
        + len(part._forward_pre_hooks)  # noqa: SLF001
        + len(part._backward_hooks)  # noqa: SLF001
        + len(part._backward_pre_hooks)  # noqa: SLF001
        for part in parts
    )


class ByOperators(nn.Module):
    """What a module that runs a device program is beside its own class."""

    operator_plan: BoundProgram

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
    plan = BoundProgram.of(module, PreparedProgram(kept, program))
    object.__setattr__(result, "operator_plan", plan)
    return result


def run(plan: BoundProgram, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the module returns, whose gradients start the pass's backward."""
    captured = plan.prepared.captured
    given = Arguments(args, kwargs)
    states = plan.states()
    _check(plan, given, states)
    now = ProgramPass(plan.prepared, states, given.tensors)
    outputs = now.forward()
    if not any(value is not None for value in captured.tangents):
        return captured.form.with_tensors(tuple(outputs))
    link = _Link(now, states, given.tensors, captured.device)
    fixed = [value is None for value in captured.tangents]
    results = tied_to_backward(link, given.tensors, outputs, fixed)
    outputs.clear()
    return captured.form.with_tensors(results)


def _check(plan: BoundProgram, given: Arguments, states: Mapping[str, Tensor]) -> None:
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
    trained = tuple(each.requires_grad for each in states.values())
    if trained != plan.trained:
        raise _unlike("requires_grad of parameters", "others", "those of the captured call")
    if _hooks(plan.parts) != plan.hooks:
        raise _unlike("hooks of submodules", "others, which would not run", "those")
    hooked = next((name for name, each in states.items() if is_hooked(each)), None)
    if hooked is not None:
        raise _unlike(f"{hooked}", "a hook on its gradient, which would not run", "none")


def _unlike(what: str, got: object, need: object) -> InputError:
    return InputError(
        f"module by operators: {what}: got {got}, need {need} as captured. Capture and plan this"
        " call, or leave it out."
    )


class _Link:
    """A pass and the gradients that start its backward; what was used is forgotten."""

    def __init__(
        self,
        now: ProgramPass,
        states: dict[str, Tensor],
        inputs: list[Tensor],
        device: torch.device,
    ) -> None:
        self.now: ProgramPass | None = now
        self.gradients: list[Tensor | None] = []
        self._read = [each for each in states.values() if isinstance(each, nn.Parameter)]
        self._inputs = [inputs[place].detach() for place in now.kept_inputs()]
        self._device = device
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
        cast = around(self._device)
        if cast is not None:
            raise InputError(
                f"module by operators: got a backward under autocast to {cast}, need it outside as"
                " captured. Leave the block of autocast before backward()."
            )
        if self._versions() != self._before:
            raise InputError(
                "module by operators: weights or inputs changed between forward and backward, need"
                " the same. Update them behind the backward."
            )
        self._read, self._inputs = [], []
        return now.backward(self.gradients)
