"""GPT-2: a decoder-only transformer with learned positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeplan.task import Task, task_function
from pipeplan.tasks.attention import Block
from pipeplan.tasks.data import tokens
from pipeplan.tasks.training import adamw, next_token_loss, preset


@dataclass(frozen=True, slots=True)
class _Shape:
    layers: int
    width: int
    heads: int
    vocabulary: int = 50257
    positions: int = 1024


SIZES: dict[str | int, _Shape] = {
    "tiny": _Shape(4, 64, 4, vocabulary=256, positions=64),
    "small": _Shape(12, 768, 12),
    "medium": _Shape(24, 1024, 16),
    "large": _Shape(36, 1280, 20),
    "xl": _Shape(48, 1600, 25),
}


class Gpt2(nn.Module):
    """Token ids (rows, positions) -> logits (rows, positions, vocabulary)."""

    def __init__(self, shape: _Shape, *, dropout: float, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.positions, shape.width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(shape.width, shape.heads, dropout=dropout, causal=True)
            for _ in range(shape.layers)
        )
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        self.apply(_initialize)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token at every position."""
        places = torch.arange(ids.shape[1], device=ids.device)
        hidden = self.drop(self.tokens(ids) + self.positions(places))
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


@task_function
def gpt2(
    seed: int = 0,
    *,
    size: str = "tiny",
    batch: int = 2,
    sequence: int | None = None,
    dropout: float = 0.1,
    tied: bool = False,
) -> Task:
    """GPT-2 with AdamW; sizes tiny, small, medium, large, xl; `tied` shares embedding and head."""
    shape = preset("gpt2", size, SIZES)
    length = sequence or shape.positions
    return Task(
        model=Gpt2(shape, dropout=dropout, tied=tied),
        loss=next_token_loss,
        optimizer=adamw(3e-4),
        data=tokens(seed, batch, length, shape.vocabulary),
        unit="token",
        units_per_microbatch=batch * length,
    )
