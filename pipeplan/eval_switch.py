"""Modules whose eval mode is more than a flag, switched by their own code; weights stay the same.

`capture` evaluates a model to cut it as a graph, `runtime` the layers of a stage: both must do
what the model's own `eval()` does. Hence this lies below both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from pipeplan.empty import is_empty, storage_of
from pipeplan.layout import overwrite

_Weights = Sequence[tuple[Tensor, Tensor, Tensor]]
"""Parameter or buffer, its memory, a copy of its values."""


def switch_to_eval(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """Put all modules of `roots` into eval mode; those that did it by a `train()` of their own.

    The caller undoes it: `train(..)` of those that are returned, then the flags.
    """
    modules = list(dict.fromkeys(module for root in roots for module in root.modules()))
    own = [module for module in modules if type(module).train is not nn.Module.train]
    inner = {part for module in own for part in module.modules() if part is not module}
    outer = [module for module in own if module not in inner]
    for module in set(modules).difference(outer, inner):
        module.training = False
    return [module for module in outer if switched(module, lambda m: m.train(False))]


def switched(module: nn.Module, switch: Callable[[nn.Module], object]) -> bool:
    """Whether `switch(module)`, which puts it into eval mode, has left its weights as they were.

    One that changes weights (LoRA that is merged) stays as in training, but for its flags: its
    weights have versions, are trained, and must keep their bits.
    """
    weights, mode = _weights(module), module.training
    try:
        switch(module)
        if not _moved(weights):
            return True
        module.train(mode)
    finally:
        _put_back(weights)
    for part in module.modules():
        part.training = False
    return False


def _weights(module: nn.Module) -> _Weights:
    """Those with values of modules inside that have a `train()` or an `eval()` of their own."""
    own = [part for part in module.modules() if _has_own_switch(type(part))]
    tensors = [each for part in own for each in (*part.parameters(), *part.buffers())]
    return [
        (each, each.data, each.detach().clone())
        for each in dict.fromkeys(tensors)
        if storage_of(each) is not None and not is_empty(each)
    ]


def _has_own_switch(kind: type[nn.Module]) -> bool:
    return kind.train is not nn.Module.train or kind.eval is not nn.Module.eval


def _moved(weights: _Weights) -> bool:
    """Whether one has other memory or other values."""
    return any(
        each.data_ptr() != data.data_ptr() or not torch.equal(each.detach(), kept)
        for each, data, kept in weights
    )


def _put_back(weights: _Weights) -> None:
    for each, data, kept in weights:
        if each.data_ptr() != data.data_ptr():
            each.data = data
        if not torch.equal(each.detach(), kept):
            overwrite(each, kept)
