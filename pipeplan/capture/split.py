"""Cuts a task's model into the layers of its chain, and finds what passes between them.

Both `profile` and `launch` split the same task the same way, so the chain's layers are the
runtime's layers. The layers hold the user's own Parameter objects: nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from pipeplan.capture.cuts import coarsened, natural
from pipeplan.capture.export import export
from pipeplan.capture.flow import Flow
from pipeplan.capture.pieces import pieces
from pipeplan.capture.rows import is_row, row_layers
from pipeplan.capture.trace import Trace, has_fakes, trace
from pipeplan.capture.whole import check_same
from pipeplan.errors import InputError
from pipeplan.precision import casting, check_autocast
from pipeplan.task import SplitModel, Task


def split(task: Task, max_layers: int | None = None) -> SplitModel:
    """The layers of `task.model` and the boundaries between them.

    `nn.Sequential` and lists give one layer per module. Any other model is exported into a graph
    and cut where little passes; its layers are checked to compute exactly what it computes.
    Boundaries come from a pass over micro-batch 0 that computes nothing where the model allows.
    The random state of torch is left as it was.

    Args:
        task: model, loss and data are used.
        max_layers: merges layers until there are no more than these; the ones that are cheap
            to lose first.

    Raises:
        InputError: if the model cannot be exported, a layer fails or returns something other
            than tensors, or the loss is no scalar.
    """
    if max_layers is not None and max_layers < 1:
        raise InputError(f"split: max_layers: got {max_layers}, need at least 1")
    check_autocast(task.autocast)
    model = _as_module(task.model)
    device = _device(model)
    source, target = (part.to(device) for part in task.microbatch(0))
    with torch.random.fork_rng(), casting(task.autocast, device):
        if is_row(model):
            layers, traced = row_layers(model, task.loss, source, target, max_layers)
            found = _made(model, layers, traced, source)
        else:
            found = _by_graph(task, model, source, target, max_layers)
    return replace(found, autocast=task.autocast)


def _by_graph(
    task: Task, model: nn.Module, source: Tensor, target: Tensor, max_layers: int | None
) -> SplitModel:
    flow = Flow(export(model, (source,)))
    evaluation = _in_eval_mode(model, source)
    cuts = natural(flow)
    if max_layers is not None:
        cuts = coarsened(flow, cuts, max_layers)
    made = pieces(flow, cuts, evaluation)
    layers: dict[str, nn.Module] = {piece.name: piece.module for piece in made}
    fed = tuple(piece.fed for piece in made)
    result = _made(model, layers, trace(layers, task.loss, source, target, fed), source, fed)
    if not has_fakes([model]):
        check_same(model, result, (source,))
    return result


def _in_eval_mode(model: nn.Module, source: Tensor) -> Flow | None:
    """The flow of `model` when it is evaluated; None if that has no graph."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        return Flow(export(model, (source,)))
    except InputError:
        return None
    finally:
        for module, training in modes.items():
            module.training = training


def _made(
    model: nn.Module,
    layers: dict[str, nn.Module],
    traced: Trace,
    source: Tensor,
    fed: tuple[tuple[int, ...], ...] = (),
) -> SplitModel:
    names = _tensor_names(model)
    return SplitModel(
        layers=tuple(layers.values()),
        names=tuple(layers),
        fqns=tuple(_fqns(layer, names) for layer in layers.values()),
        boundaries=traced.boundaries,
        microbatch_size=source.shape[0] if source.dim() else 1,
        fed=fed if any(fed) else (),
    )


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


def _device(model: nn.Module) -> torch.device:
    """Where the model is; a model without tensors is on the processor."""
    state = next((tensor for tensor in [*model.parameters(), *model.buffers()]), None)
    return torch.device("cpu") if state is None else state.device


def _tensor_names(model: nn.Module) -> dict[int, str]:
    """Name of each parameter and buffer by identity: the first name, where it has several."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {id(tensor): name for name, tensor in named}


def _fqns(layer: nn.Module, names: dict[int, str]) -> dict[str, str]:
    """Constants of an exported model have no other name than the one in the layer."""
    parameters = layer.named_parameters(remove_duplicate=False)
    buffers = layer.named_buffers(remove_duplicate=False)
    return {local: names.get(id(tensor), local) for local, tensor in [*parameters, *buffers]}
