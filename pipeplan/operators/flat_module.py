"""A module as a function of tensors: each parameter and buffer once, inputs and outputs flat."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipeplan.gradients import has_hooks
from pipeplan.operators.refusals import UncapturableError


class TensorTree:
    """A structure of tensors and other things, as pytrees are: which leaves are tensors."""

    def __init__(self, tree: Any) -> None:
        leaves, self._form = pytree.tree_flatten(tree)
        self._places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    @staticmethod
    def tensors_in(tree: Any) -> tuple[Tensor, ...]:
        """The tensors of a structure, in order."""
        return tuple(leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor))

    @property
    def count(self) -> int:
        """How many tensors there are."""
        return len(self._places)

    def same_form(self, other: TensorTree) -> bool:
        """Whether `other` differs in tensors alone."""
        return self._form == other._form and self._rest == other._rest

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Any:
        """The structure with other tensors."""
        leaves = list(self._rest)
        for place, tensor in zip(self._places, tensors, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, self._form)


class Arguments(TensorTree):
    """Those of one call: tensors, and all else as it was."""

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        both = (args, dict(kwargs))
        super().__init__(both)
        self.tensors = list(self.tensors_in(both))
        self.facts = tuple(map(_facts, self.tensors))
        """What must be the same in another call, of each tensor."""

    def without_tensors(self) -> Arguments:
        """The same, keeping no tensor alive."""
        result = copy.copy(self)
        result.tensors = []
        return result

    def filled(self, tensors: tuple[Tensor, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other tensors."""
        args, kwargs = self.with_tensors(tensors)
        return args, kwargs


def _facts(tensor: Tensor) -> str:
    sizes = f"{tensor.dtype} of shape {list(tensor.shape)} and strides {list(tensor.stride())}"
    return f"{sizes} on {tensor.device}{' with a gradient' if tensor.requires_grad else ''}"


def is_hooked(tensor: Tensor) -> bool:
    """Whether something runs behind its gradient, such as a step; sums of ours do not count."""
    return has_hooks(tensor)


def states_of(module: nn.Module) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """Parameters and buffers by their first names; shared ones appear once."""
    return dict(module.named_parameters()), dict(module.named_buffers())


def states_for_trial(module: nn.Module) -> dict[str, Tensor]:
    """Tensors for a pass that leaves `module` as it is.

    Parameters come without gradients, which such a pass adds to, and buffers as copies.
    """
    parameters, buffers = states_of(module)
    shared = {name: each.detach() for name, each in parameters.items()}
    return {**shared, **{name: each.clone() for name, each in buffers.items()}}


class FlatModule(nn.Module):
    """Calls a module with tensors in a row; its own parameters are `p0`, .., its buffers `b0`, ..

    Shared parameters are one here, so that autograd adds their gradients as it does in the module.
    """

    def __init__(self, module: nn.Module, arguments: Arguments) -> None:
        super().__init__()
        self._hidden = (module,)  # in a tuple, torch does not take it for a submodule
        self._arguments = arguments
        parameters, buffers = states_of(module)
        self._names: dict[str, str] = {}
        for index, (name, parameter) in enumerate(parameters.items()):
            self._names[f"p{index}"] = name
            self.register_parameter(f"p{index}", parameter)
        for index, (name, buffer) in enumerate(buffers.items()):
            self._names[f"b{index}"] = name
            self.register_buffer(f"b{index}", buffer)
        self.results: TensorTree | None = None
        self.differentiable: set[int] = set()
        """Places of outputs that were seen to require a gradient."""
        self.passed: set[int] = set()
        """Places of outputs that are inputs; here they are copies, so that they have gradients."""

    def name(self, own: str) -> str:
        """The module's name of parameter or buffer `own`."""
        return self._names[own]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The tensors of what the module returns.

        Raises:
            UncapturableError: if the module replaces a buffer or returns no tensor.
        """
        args, kwargs = self._arguments.filled(inputs)
        given = {name: getattr(self, own) for own, name in self._names.items()}
        state = dict(given)
        (module,) = self._hidden
        result = torch.func.functional_call(module, state, args, kwargs, tie_weights=True)
        for name, tensor in given.items():
            if state[name] is not tensor:
                raise UncapturableError(
                    f"{name}: the forward puts another tensor in its place, need one that is"
                    " written to in place"
                )
        tensors = TensorTree.tensors_in(result)
        if not tensors:
            raise UncapturableError("the forward returns no tensor, need at least one")
        self.results = TensorTree(result)
        self.differentiable |= {i for i, each in enumerate(tensors) if each.requires_grad}
        handed_in = set(map(id, inputs))
        self.passed |= {i for i, each in enumerate(tensors) if id(each) in handed_in}
        return tuple(
            each.clone() if place in self.passed else each for place, each in enumerate(tensors)
        )
