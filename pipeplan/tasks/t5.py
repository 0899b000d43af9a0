"""T5-like encoder-decoder: the encoder's output rides along every layer of the decoder."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeplan.task import Task, task_function
from pipeplan.tasks.attention import Attention, Block, Mlp
from pipeplan.tasks.data import tokens
from pipeplan.tasks.training import adamw, next_token_loss, preset


@dataclass(frozen=True, slots=True)
class _Shape:
    layers: int
    """Of the encoder, and as many of the decoder."""
    width: int
    heads: int
    vocabulary: int = 32128
    positions: int = 512


SIZES: dict[str | int, _Shape] = {
    "tiny": _Shape(2, 64, 4, vocabulary=256, positions=32),
    "small": _Shape(6, 512, 8),
    "base": _Shape(12, 768, 12),
    "large": _Shape(24, 1024, 16),
}


class _DecoderBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout=dropout, causal=True)
        self.norm_2 = nn.LayerNorm(width)
        self.cross = Attention(width, heads, dropout=dropout)
        self.norm_3 = nn.LayerNorm(width)
        self.mlp = Mlp(width, dropout=dropout)

    def forward(self, hidden: Tensor, memory: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm_1(hidden))
        hidden = hidden + self.cross(self.norm_2(hidden), memory)
        result: Tensor = hidden + self.mlp(self.norm_3(hidden))
        return result


class T5(nn.Module):
    """Ids (rows, 2 * positions), source before target -> logits of the target's next tokens.

    Source and target come as one tensor; embedding and head share their weight if `tied`.
    """

    def __init__(self, shape: _Shape, *, dropout: float, tied: bool) -> None:
        super().__init__()
        width, heads = shape.width, shape.heads
        self.tokens = nn.Embedding(shape.vocabulary, width)
        self.positions = nn.Embedding(shape.positions, width)
        self.encoder = nn.ModuleList(
            Block(width, heads, dropout=dropout) for _ in range(shape.layers)
        )
        self.encoder_norm = nn.LayerNorm(width)
        self.decoder = nn.ModuleList(
            _DecoderBlock(width, heads, dropout) for _ in range(shape.layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, shape.vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (rows, positions, vocabulary)."""
        source, target = ids.chunk(2, dim=1)
        places = self.positions(torch.arange(source.shape[1], device=ids.device))
        memory = self.tokens(source) + places
        for block in self.encoder:
            memory = block(memory)
        memory = self.encoder_norm(memory)
        hidden = self.tokens(target) + places
        for block in self.decoder:
            hidden = block(hidden, memory)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


@task_function
def t5(
    seed: int = 0,
    *,
    size: str = "tiny",
    batch: int = 2,
    sequence: int | None = None,
    dropout: float = 0.1,
    tied: bool = False,
) -> Task:
    """An encoder-decoder with AdamW that continues its source; sizes tiny, small, base, large.

    Encoder and decoder share the embedding, so their first layers share a GPU.
    """
    shape = preset("t5", size, SIZES)
    length = sequence or shape.positions
    rows = tokens(seed, batch, 2 * length, shape.vocabulary)

    def data(microbatch: int) -> tuple[Tensor, Tensor]:
        ids, following = rows(microbatch)
        return ids, following[:, length:]

    return Task(
        model=T5(shape, dropout=dropout, tied=tied),
        loss=next_token_loss,
        optimizer=adamw(3e-4),
        data=data,
        unit="token",
        units_per_microbatch=batch * length,
    )
