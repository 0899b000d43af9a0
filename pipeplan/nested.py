"""Nested tensors: what a model is called with, what it returns, what a loss compares with.

Inside the package a model's input is a flat row of tensors, and so is its output; here is how they
lie in what the user's model takes and returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_map_only,
    tree_structure,
    tree_unflatten,
)

from pipeplan.errors import InputError
from pipeplan.task import Task


class _Mark(Enum):
    """Stays the same object in copies."""

    TENSOR = "tensor"


_TENSOR = _Mark.TENSOR
"""Stands for a tensor among constants."""
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout)

LayerLoss = Callable[[Any, Any], Tensor]
"""What the last layer returns (a tensor or a tuple), target -> scalar."""


@dataclass(frozen=True, slots=True)
class Structure:
    """Nested arguments or results: how they are nested, and all in them that is no tensor."""

    form: TreeSpec
    leaves: tuple[Any, ...]
    """`_TENSOR` for each tensor."""

    @classmethod
    def of(cls, value: Any, kind: type | tuple[type, ...] = Tensor) -> tuple[Structure, list[Any]]:
        """The structure of `value`, and its tensors, or what else of `kind` stands for them."""
        leaves, form = tree_flatten(value)
        found = [leaf for leaf in leaves if isinstance(leaf, kind)]
        marked = tuple(_TENSOR if isinstance(leaf, kind) else leaf for leaf in leaves)
        return cls(form, marked), found

    def filled(self, values: Sequence[Any]) -> Any:
        """`values` in the places of the tensors."""
        given = iter(values)
        return tree_unflatten(
            [next(given) if leaf is _TENSOR else leaf for leaf in self.leaves], self.form
        )

    @property
    def odd(self) -> str | None:
        """The type of a leaf that a graph cannot hold as a constant; None: there is none."""
        others = (leaf for leaf in self.leaves if leaf is not _TENSOR)
        return next((type(leaf).__name__ for leaf in others if not isinstance(leaf, _PLAIN)), None)


def ordered(value: Any, as_in: Structure | None) -> Any:
    """`value` with the keys of its dicts in the order of `as_in`, if it is nested like that."""
    if as_in is None or tree_structure(value) == as_in.form:
        return value
    try:
        return tree_unflatten(as_in.form.flatten_up_to(value), as_in.form)
    except ValueError:  # another nesting
        return value


class _Word(str):
    """A word that is shown without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


_MOST = 120
"""Letters of a structure that people are shown."""


def text_of(structure: Structure, *, is_call: bool = False) -> str:
    """How things are nested, for people: `(tensor, mask=tensor)` of what a model is called with.

    Args:
        structure: of anything.
        is_call: whether it is that of (positional, named).
    """
    value = structure.filled([_Word("tensor")] * len(structure.leaves))
    if is_call:
        positional, named = value
        parts = [*map(repr, positional), *(f"{name}={each!r}" for name, each in named.items())]
        value = _Word(f"({', '.join(parts)})")
    told = repr(value)
    return told if len(told) <= _MOST else f"{told[:_MOST]}.."


@dataclass(frozen=True, slots=True)
class ModelArguments:
    """What a model is called with."""

    tensors: tuple[Tensor, ...]
    structure: Structure
    """Of (positional, named)."""

    @classmethod
    def of(cls, value: Any, as_in: Structure | None = None) -> Self:
        """A tuple or list gives positional arguments, a dict named ones, all else a single one.

        Args:
            value: as `Task.data` gives it.
            as_in: of the first micro-batch, whose order of keys all others get.
        """
        named = dict(value) if isinstance(value, Mapping) else {}
        row = tuple(value) if isinstance(value, tuple | list) else () if named else (value,)
        structure, tensors = Structure.of(ordered((row, named), as_in))
        return cls(tuple(tensors), structure)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        """With `function` of each tensor in its place."""
        return replace(self, tensors=tuple(map(function, self.tensors)))

    def filled(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and named arguments."""
        positional, named = self.structure.filled(self.tensors)
        return positional, named

    def call(self, function: Callable[..., Any], **more: Any) -> Any:
        """What `function` returns for the arguments, and for `more` that they do not name."""
        positional, named = self.filled()
        return function(*positional, **{**more, **named})


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch."""

    arguments: ModelArguments
    """Of the model."""
    target: Any
    """What the loss compares with: nested tensors, or None where the model has its own loss."""

    @classmethod
    def of(
        cls,
        task: Task,
        number: int,
        arguments: Structure | None = None,
        target: Structure | None = None,
    ) -> Self:
        """Micro-batch `number` of the task's data, in tensors that nobody else has.

        Args:
            task: whose data.
            number: of the micro-batch.
            arguments: of the first one, whose order of keys all others get.
            target: of the first one, too.

        Raises:
            InputError: if `data` fails, or gives something else than nested tensors, or none with
                elements for the model.
        """
        given, compared = task.microbatch(number)
        made = cls(ModelArguments.of(given, arguments), ordered(compared, target))
        if made.inputs and not any(tensor.numel() for tensor in made.inputs):
            shapes = ", ".join(str(list(tensor.shape)) for tensor in made.inputs)
            raise InputError(
                f"task: data({number}): got inputs of shape {shapes}, need at least one sample"
            )
        return made

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """The tensors that the model is called with."""
        return self.arguments.tensors

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All, those of the target behind those of the input."""
        return (*self.inputs, *tensors_in(self.target))

    def filled(self, tensors: Sequence[Tensor]) -> Self:
        """The same with other `tensors`."""
        count = len(self.inputs)
        structure, _ = Structure.of(self.target)
        arguments = replace(self.arguments, tensors=tuple(tensors[:count]))
        return replace(self, arguments=arguments, target=structure.filled(tensors[count:]))

    def mapped(self, function: Callable[[Tensor], Tensor]) -> Self:
        """With `function` of each tensor in its place."""
        return self.filled([function(tensor) for tensor in self.tensors])


def mapped(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Nested `value` with `function` of each tensor in its place."""
    return tree_map_only(Tensor, function, value)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in nested `value`, in order."""
    return Structure.of(value)[1]


def returned(result: Any, *, own_loss: bool) -> tuple[list[Any], Structure | None]:
    """The tensors of what a model returns, and how they lie in what its loss is given.

    The structure is None where there is one tensor: that is what the loss is given, or the model's
    own loss, beside which nothing is looked at.

    Args:
        result: of the model, with tensors or what stands for them.
        own_loss: whether the model computes its loss itself.

    Raises:
        InputError: if the model shall have a loss of its own and returns none.
    """
    if own_loss:
        return [loss_in(result)], None
    structure, found = Structure.of(result, (Tensor, torch.fx.Node))
    return found, structure if len(found) > 1 else None


def loss_in(result: Any) -> Any:
    """The loss in what a model returns: `loss` by name, the first of a row, or the one tensor.

    Raises:
        InputError: if there is none.
    """
    if isinstance(result, Mapping):
        found = result.get("loss")
    elif isinstance(result, tuple | list):
        found = result[0] if result else None
    else:
        found = getattr(result, "loss", result)
    if not isinstance(found, Tensor | torch.fx.Node):
        raise InputError(
            f"task: loss=None: the model returned a {type(result).__name__} without a loss, need"
            " a scalar tensor, a row that begins with it, or a dict or object with `loss`. Hugging"
            " Face models compute it where data(n) has `labels`; or give the task a loss."
        )
    return found


def layer_loss(loss: Callable[[Any, Any], Tensor] | None, given: Structure | None) -> LayerLoss:
    """The task's loss as a function of what the last layer returns.

    Args:
        loss: of the task.
        given: how the last layer's tensors lie in what the loss is given; None: there is one.
    """
    if loss is None:
        return _itself
    return loss if given is None else _NestedLoss(loss, given)


def _itself(value: Any, _: Any) -> Tensor:
    """The last layer returns the model's own loss."""
    result: Tensor = value
    return result


@dataclass(frozen=True, slots=True)
class _NestedLoss:
    loss: Callable[[Any, Any], Tensor]
    given: Structure

    def __call__(self, values: tuple[Tensor, ...], target: Any) -> Tensor:
        return self.loss(self.given.filled(values), target)
