"""Calls of the whole model: its output, the output of all its layers, calls that may fail."""

from __future__ import annotations

import inspect
import io
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr

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


def run_layers(split: SplitModel, inputs: Sequence[Tensor]) -> Tensor:
    """The output of all layers in a row."""
    values: tuple[Tensor, ...] = tuple(inputs)
    for index, layer in enumerate(split.layers):
        result = layer(*values, *(inputs[place] for place in split.fed_to(index)))
        values = result if isinstance(result, tuple) else (result,)
    return values[0]


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps back what torch logs and prints of what fails inside: the error says it.

    The graph so far, which torch prints to stderr, is the error's; what the model itself prints
    there is passed on.
    """
    logger = logging.getLogger("torch")
    before, said, graph = logger.level, io.StringIO(), ""
    logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(said):
            yield
    except Exception as error:
        graph = getattr(error, "partial_fx_graph", "")
        raise
    finally:
        logger.setLevel(before)
        text = said.getvalue()
        sys.stderr.write(text.replace(f"{graph}\n", "") if graph else text)
