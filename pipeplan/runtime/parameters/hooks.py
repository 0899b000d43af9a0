"""Hooks on parameters: they run as in a plain loop, also where graphs use leaves in their place.

And what must not happen to a parameter meanwhile: a gradient that comes to the parameter while a
leaf stands in for it is one that no update would see.

Under 2bw the leaf of a slot stands in for the parameter. Its gradient goes through the hooks that
the parameter has at that moment, and while they run the parameter itself holds the weights and the
sum of gradients that the graph uses. Hooks may change gradients; weights are changed by the task's
optimizer alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from pipeplan.errors import InputError
from pipeplan.gradients import Adder, give_sum, take_sum
from pipeplan.runtime.parameters.slots import ParameterSlots

Hook = Callable[[Any], Any]
_Mark = tuple[int, nn.Parameter, int, int]
"""Index, leaf, and how often parameter and leaf were written to."""
_Gradient = tuple[Tensor | None, int]
"""A parameter's own one, and how often it was written to."""


class ParameterHooks:
    """The hooks on the parameters of one `ParameterSlots`."""

    def __init__(self, slots: ParameterSlots, names: Mapping[nn.Parameter, str]) -> None:
        """Takes the slots, and each parameter's name in the user's model."""
        self._slots = slots
        self._names = names
        self._families = tuple(
            tuple(dict.fromkeys((parameter, *row)))
            for parameter, *row in zip(slots.parameters, *slots.leaves, strict=True)
        )
        """Of each parameter: itself, and what stands in for it."""
        self._counts: list[int] = []
        self._hooked: list[int] = []
        self._beside = () if slots.borrows else _stood_in_for(slots)
        self._gradients: list[_Gradient] = []

    def follow(self) -> None:
        """Take the hooks and gradients that parameters have now; a run begins.

        Raises:
            InputError: if a hook looks at several parameters at once.
        """
        self._counts = [sum(map(len, map(hooks_of, family))) for family in self._families]
        self._hooked = [index for index, count in enumerate(self._counts) if count]
        self._gradients = list(map(_gradient, self._beside))
        for index in self._hooked:
            parameter, *leaves = self._families[index]
            for member in self._families[index]:
                _check_single(member, self._names[parameter])
            for leaf in leaves:
                _stand_in(leaf, parameter, [each for each in leaves if each is not leaf])

    def before(self, step: int) -> list[_Mark]:
        """What `check` compares with after a backward of `step`."""
        slots = self._slots
        row = slots.leaves[slots.read_by(step)]
        return [
            (index, row[index], _writes(slots.parameters[index]), _writes(row[index]))
            for index in self._hooked
        ]

    def check(self, step: int, before: Sequence[_Mark]) -> None:
        """Refuse what hooks must not do in a backward.

        Raises:
            InputError: if a hook changed a weight, or put another tensor in its gradient's place.
        """
        for index, leaf, *writes in before:
            parameter = self._slots.parameters[index]
            name = self._names[parameter]
            if [_writes(parameter), _writes(leaf)] != writes:
                raise InputError(
                    f"task: parameter {name!r}: a hook on it changes the weight during a backward,"
                    " while other micro-batches use it. Remove the hook: Task.optimizer makes the"
                    " update once per step."
                )
            total = self._slots.gradients(step)[index]
            if leaf.grad is not (total if total.dtype == leaf.dtype else None):
                raise InputError(
                    f"task: parameter {name!r}: a hook on it replaces .grad, in which the"
                    " micro-batches of a step add up. Change .grad in place, or return the changed"
                    " gradient from a hook of register_hook."
                )

    def check_none_new(self) -> None:
        """Refuse hooks that came since `follow`.

        Raises:
            InputError: if there is one.
        """
        for family, count in zip(self._families, self._counts, strict=True):
            if sum(map(len, map(hooks_of, family))) > count:
                raise InputError(
                    f"task: parameter {self._names[family[0]]!r}: got a hook during a run, which"
                    " gradients of earlier micro-batches would meet, too. Register it before the"
                    " run, not in a layer's forward."
                )

    def check_none_beside(self) -> None:
        """Refuse gradients that came to a parameter since `follow`, past the leaf in its place.

        Raises:
            InputError: if there is one.
        """
        for parameter, (before, writes) in zip(self._beside, self._gradients, strict=True):
            gradient, now = _gradient(parameter)
            if gradient is not before or now != writes:
                place = self._slots.places(parameter)[0]
                raise InputError(
                    f"task: parameter {self._names[parameter]!r}: got a gradient that no update"
                    f" sees: a layer uses it without asking {type(place.module).__name__} for"
                    f" {place.name!r}, as from a list, a dictionary or a closure. Under 2bw, and"
                    " for sums in 32 bits, other tensors stand in for parameters while layers"
                    f" run, in their attributes alone. Write self.{place.name} in the forward, or"
                    " keep several of them in an nn.ParameterList."
                )


def _stood_in_for(slots: ParameterSlots) -> tuple[nn.Parameter, ...]:
    """Parameters that no graph should know, as each slot has a leaf of its own."""
    rows = zip(slots.parameters, *slots.leaves, strict=True)
    return tuple(parameter for parameter, *row in rows if all(x is not parameter for x in row))


def _gradient(parameter: nn.Parameter) -> _Gradient:
    gradient = parameter.grad
    return gradient, 0 if gradient is None else _writes(gradient)


def hooks_of(parameter: Tensor) -> list[Hook]:
    """The user's hooks on `parameter`: on its gradient, and on what is added up."""
    return [*_on_gradient(parameter), *_on_sum(parameter)]


def _on_gradient(parameter: Tensor) -> list[Hook]:
    return _of_user(parameter._backward_hooks)  # noqa: SLF001 - torch has no public name for them


def _on_sum(parameter: Tensor) -> list[Hook]:
    return _of_user(parameter._post_accumulate_grad_hooks)  # noqa: SLF001


def _of_user(hooks: Mapping[int, Hook] | None) -> list[Hook]:
    ours = (_StandIn, Adder)
    return [hook for hook in hooks.values() if not isinstance(hook, ours)] if hooks else []


def _writes(tensor: Tensor) -> int:
    return tensor._version  # noqa: SLF001


def _check_single(parameter: nn.Parameter, name: str) -> None:
    for hook in hooks_of(parameter):
        if getattr(hook, "__globals__", {}).get("__name__") == "torch.autograd.graph":
            raise InputError(
                f"task: parameter {name!r}: got a hook of register_multi_grad_hook, which waits"
                " for gradients of a whole backward; each stage has one of its own. Use"
                " register_hook on each parameter."
            )


def _stand_in(leaf: nn.Parameter, parameter: nn.Parameter, others: Sequence[nn.Parameter]) -> None:
    """Let the gradient of `leaf` go through the hooks of `parameter`, from now on."""
    known = (leaf._backward_hooks or {}).values()  # noqa: SLF001
    if not any(isinstance(hook, _StandIn) for hook in known):
        total = take_sum(leaf)  # its hook, if it has one, comes behind the user's
        leaf.register_hook(_OnGradient(leaf, parameter, others))
        leaf.register_post_accumulate_grad_hook(_OnSum(leaf, parameter, others))
        if total is not None:
            give_sum(leaf, total)


@dataclass(frozen=True, slots=True, eq=False)
class _StandIn:
    """Calls the hooks that a parameter has at that moment.

    Also those on its other leaves: what a module shows its user while a pipeline lives is a leaf.
    """

    leaf: nn.Parameter
    parameter: nn.Parameter
    others: Sequence[nn.Parameter]

    @contextmanager
    def _acting(self) -> Iterator[None]:
        """Let the parameter hold what the leaf holds; what happens to .grad stays in the leaf."""
        leaf, parameter = self.leaf, self.parameter
        data, gradient = parameter.data, parameter.grad
        parameter.data, parameter.grad = leaf.data, leaf.grad
        try:
            yield
        finally:
            leaf.grad = parameter.grad
            parameter.data, parameter.grad = data, gradient


class _OnGradient(_StandIn):
    def __call__(self, gradient: Tensor) -> Tensor:
        """The gradient that is to be added up."""
        with self._acting():
            for each in (self.parameter, *self.others):
                for hook in _on_gradient(each):
                    changed = hook(gradient)
                    gradient = gradient if changed is None else changed
        return gradient


class _OnSum(_StandIn):
    def __call__(self, _: Tensor) -> None:
        """Called when the gradient has been added."""
        with self._acting():
            for each in (self.parameter, *self.others):
                for hook in _on_sum(each):
                    hook(self.parameter)
