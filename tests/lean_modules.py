"""Small modules, as rows of layers and such that must be exported, within their least budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeplan import rematerialize
from pipeplan.errors import InfeasibleError
from pipeplan.testing.refusals import least_bytes

SAMPLE = (torch.ones(64, 8), torch.zeros(64, 8))
LOSS = nn.functional.mse_loss
_LEAST: dict[str, int] = {}
"""Least budgets of modules by their text: bytes are the same however often they are measured."""


class Residual(nn.Module):
    """Not a row of layers: it has to be exported."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(8, 8)

    def forward(self, value: Tensor) -> Tensor:
        """Adds what each block gives."""
        for block in self.blocks:
            value = value + block(value)
        result: Tensor = self.head(value)
        return result


def blocks(*more: Callable[[], nn.Module]) -> list[nn.Module]:
    """Three of them, with running statistics."""
    return [
        nn.Sequential(
            nn.Linear(8, 16),
            nn.BatchNorm1d(16),
            nn.GELU(),
            nn.Linear(16, 8),
            *(each() for each in more),
        )
        for _ in range(3)
    ]


def row(*more: Callable[[], nn.Module]) -> nn.Sequential:
    """Layers that are used as they are."""
    torch.manual_seed(0)
    return nn.Sequential(*blocks(*more))


def exported(*more: Callable[[], nn.Module]) -> nn.Module:
    """Layers that are made from the module."""
    torch.manual_seed(0)
    return Residual(blocks(*more))


def by_layers(module: nn.Module, sample: Any, budget: str | int, **options: Any) -> Any:
    """`rematerialize` by whole layers, unless `options` say otherwise."""
    return rematerialize(module, sample, budget, **{"method": "layers", **options})


def lean(module: nn.Module, loss: Any = LOSS, **options: Any) -> nn.Module:
    """`module` within the least budget: layers run again."""
    torch.manual_seed(1)
    kind = repr((module, len(list(module.buffers())), loss, options))
    if kind not in _LEAST:
        with pytest.raises(InfeasibleError) as refused:
            by_layers(module, SAMPLE, 1, loss=loss, repeats=1, **options)
        _LEAST[kind] = least_bytes(refused.value)
    result = by_layers(module, SAMPLE, _LEAST[kind], loss=loss, repeats=1, **options)
    assert result._prepared.script.again or options
    assert isinstance(result, nn.Module)
    return result


def source() -> Tensor:
    """An input."""
    return torch.randn(64, 8, generator=torch.Generator().manual_seed(2))
