"""A model in eval mode for a while, whatever its own `train()` and `eval()` do meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipeplan.capture.user_model.module_attributes import restored
from pipeplan.empty import is_empty, storage_of


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Puts weights, buffers, attributes and modes of `model` back behind the block.

    Inside, attributes are as its own `eval()` leaves them. Where that changes weights (LoRA that
    is merged), these and the attributes stay as they are in training: a stage evaluates with the
    weights that it trains.
    """
    weights = [(each, each.data, each.detach().clone()) for each in _switched(model)]
    modes = {module: module.training for module in model.modules()}
    try:
        with restored([model]):
            model.eval()
            moved = _moved(weights)
            if not moved:
                yield
        _put_back(weights)
        if moved:
            with restored([model]):
                for module in modes:
                    module.training = False
                yield
    finally:
        _put_back(weights)
        for module, training in modes.items():
            module.training = training


_Weights = Sequence[tuple[Tensor, Tensor, Tensor]]
"""Parameter or buffer, its memory, a copy of its values."""


def _switched(model: nn.Module) -> list[Tensor]:
    """Tensors with values of modules that have a `train()` or an `eval()` of their own."""
    own = [module for module in model.modules() if _has_own_switch(type(module))]
    tensors = [each for module in own for each in (*module.parameters(), *module.buffers())]
    return [
        each
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
    with torch.no_grad():
        for each, data, kept in weights:
            if each.data_ptr() != data.data_ptr():
                each.data = data
            if not torch.equal(each.detach(), kept):
                each.data.copy_(kept)
