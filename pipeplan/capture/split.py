"""Cuts a task's model into the layers of its chain, and finds what passes between them.

Both `profile` and `launch` split the same task the same way, so the chain's layers are the
runtime's layers. The layers hold the user's own Parameter objects: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from pipeplan.capture.decoder import (
    GPT2_FORM,
    LLAMA_FORM,
    check_equal,
    decoder_layers,
    is_decoder,
)
from pipeplan.capture.trace import Trace, has_fakes, trace
from pipeplan.errors import InputError
from pipeplan.task import SplitModel, Task


def split(task: Task) -> SplitModel:
    """The layers of `task.model` and the boundaries between them.

    `nn.Sequential` and lists give one layer per module; a decoder-only Hugging Face model gives
    the embedding, each block, and the final norm with the head, and is checked to compute exactly
    what the whole model computes. A layer that only gives its input another shape, or works in
    place, joins the layer before it: a cut there would save nothing.
    Boundaries come from a pass over micro-batch 0 that computes nothing where the model allows.
    The random state of torch is left as it was.

    Raises:
        InputError: if the model is of no known kind, a layer fails or returns something other
            than tensors, or the loss is no scalar.
    """
    model = _as_module(task.model)
    pieces = decoder_layers(model) if is_decoder(model) else _children(model)
    source, target = task.microbatch(0)
    with torch.random.fork_rng(devices=[]):
        traced = trace(pieces, task.loss, source, target)
        joined = _join_aliases(pieces, traced)
        if len(joined) < len(pieces):
            pieces, traced = joined, trace(joined, task.loss, source, target)
        if is_decoder(model) and not has_fakes(pieces.values()):
            check_equal(model, tuple(pieces.values()), source)
    names = _tensor_names(model)
    return SplitModel(
        layers=tuple(pieces.values()),
        names=tuple(pieces),
        fqns=tuple(_fqns(layer, names) for layer in pieces.values()),
        boundaries=traced.boundaries,
        microbatch_size=source.shape[0] if source.dim() else 1,
    )


class _Joined(nn.Module):
    """Neighbouring modules that form one layer."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, *boundary: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        values = boundary
        for part in self.parts:
            result = part(*values)
            values = result if isinstance(result, tuple) else (result,)
        return values if len(values) > 1 else values[0]


def _as_module(model: object) -> nn.Module:
    """The model as one module whose parameter names are the user's."""
    if isinstance(model, nn.Module):
        return model
    if not isinstance(model, Sequence) or isinstance(model, str):
        raise InputError(
            f"task: model: got a {type(model).__name__}, need an nn.Module or a list of modules"
        )
    for index, layer in enumerate(model):
        if not isinstance(layer, nn.Module):
            raise InputError(
                f"task: model[{index}]: got a {type(layer).__name__}, need an nn.Module"
            )
    return nn.ModuleList(model)


def _children(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a sequence by name, such as `0:Linear`; one that occurs twice comes twice."""
    if not isinstance(model, nn.Sequential | nn.ModuleList):
        raise InputError(
            f"task: model: got a {type(model).__name__}, need an nn.Sequential, a list of modules,"
            " or a decoder-only Hugging Face model with the attributes of GPT-2"
            f" ({GPT2_FORM}) or Llama ({LLAMA_FORM})."
            " Give the model's layers as a Python list."
        )
    layers = {
        f"{name}:{type(layer).__name__}": layer
        for name, layer in model.named_modules(remove_duplicate=False)
        if name and "." not in name
    }
    if not layers:
        raise InputError("task: model: got no layers, need at least one")
    return layers


def _join_aliases(pieces: dict[str, nn.Module], traced: Trace) -> dict[str, nn.Module]:
    """The layers, where each whose output is its input's memory has joined the one before it.

    The first of all joins the one after it.
    """
    starts = [index for index, alias in enumerate(traced.aliases) if index == 0 or not alias]
    if traced.aliases[0] and len(starts) > 1:
        del starts[1]
    named = list(pieces.items())
    result: dict[str, nn.Module] = {}
    for first, end in zip(starts, [*starts[1:], len(named)], strict=True):
        names, layers = zip(*named[first:end], strict=True)
        result["+".join(names)] = _Joined(layers) if len(layers) > 1 else layers[0]
    return result


def _tensor_names(model: nn.Module) -> dict[int, str]:
    """Name of each parameter and buffer by identity: the first name, where it has several."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {id(tensor): name for name, tensor in named}


def _fqns(layer: nn.Module, names: dict[int, str]) -> dict[str, str]:
    parameters = layer.named_parameters(remove_duplicate=False)
    buffers = layer.named_buffers(remove_duplicate=False)
    return {local: names[id(tensor)] for local, tensor in [*parameters, *buffers]}
