"""The model as a whole: how it is called, and the proof that its layers compute the same."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pipeplan.capture.trace import unchanged_buffers
from pipeplan.errors import InputError
from pipeplan.task import SplitModel


def call_options(model: nn.Module) -> dict[str, object]:
    """Arguments that a model gets beside its input: training has no use for caches of keys."""
    return (
        {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}
    )


def check_same(model: nn.Module, split: SplitModel, inputs: tuple[Tensor, ...]) -> None:
    """Proves on one micro-batch that the layers in a row compute what `model` computes.

    Bit for bit, with the same random numbers. What an export took for a constant though it is
    none shows here.

    Raises:
        InputError: if the outputs differ.
    """
    with torch.no_grad(), unchanged_buffers([model]):
        torch.manual_seed(0)
        result = model(*inputs, **call_options(model))
    (whole,) = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    with torch.no_grad(), unchanged_buffers([model]):
        torch.manual_seed(0)
        value = run(split, inputs)
    if not torch.equal(whole, value):
        raise InputError(
            f"task: model {type(model).__name__}: its layers in a row do not compute what the"
            " model computes on data(0). It may use random numbers other than torch's, or state"
            " outside of parameters and buffers. Give the model's layers as a Python list."
        )


def run(split: SplitModel, inputs: Sequence[Tensor]) -> Tensor:
    """The output of all layers in a row."""
    values: tuple[Tensor, ...] = tuple(inputs)
    for index, layer in enumerate(split.layers):
        result = layer(*values, *(inputs[place] for place in split.fed_to(index)))
        values = result if isinstance(result, tuple) else (result,)
    return values[0]
