"""The model as a whole: how it is called, and what its layers in a row compute."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeplan.task import SplitModel


def call_options(model: nn.Module) -> dict[str, object]:
    """Arguments that a model gets beside its input: training has no use for caches of keys."""
    return (
        {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    )


def output_of(model: nn.Module, inputs: Sequence[Tensor]) -> Tensor:
    """The one tensor that `model` returns for `inputs`, in whatever structure."""
    result = model(*inputs, **call_options(model))
    (output,) = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return output


def run(split: SplitModel, inputs: Sequence[Tensor]) -> Tensor:
    """The output of all layers in a row."""
    values: tuple[Tensor, ...] = tuple(inputs)
    for index, layer in enumerate(split.layers):
        result = layer(*values, *(inputs[place] for place in split.fed_to(index)))
        values = result if isinstance(result, tuple) else (result,)
    return values[0]
