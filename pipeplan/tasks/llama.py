"""Llama: rotary positions, grouped-query attention, gated MLP, RMS norm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, silu

from pipeplan.task import Task, task_function
from pipeplan.tasks.attention import heads_first, heads_last
from pipeplan.tasks.data import tokens
from pipeplan.tasks.training import adamw, next_token_loss, preset


@dataclass(frozen=True, slots=True)
class _Shape:
    layers: int
    width: int
    heads: int
    inner: int
    shared_heads: int
    """Heads of keys and values."""
    vocabulary: int = 32000
    positions: int = 2048


SIZES: dict[str | int, _Shape] = {
    "tiny": _Shape(4, 64, 4, 172, 2, vocabulary=256, positions=64),
    "1b": _Shape(22, 2048, 32, 5632, 4),
    "7b": _Shape(32, 4096, 32, 11008, 32),
    "13b": _Shape(40, 5120, 40, 13824, 40),
    "70b": _Shape(80, 8192, 64, 28672, 8),
}

ROTARY_BASE = 10000.0


def _rotated(value: Tensor, angles: Tensor) -> Tensor:
    """Each pair of halves of (rows, heads, positions, width) turned by its position's angle."""
    left, right = value.chunk(2, dim=-1)
    cos, sin = angles.cos().to(value.dtype), angles.sin().to(value.dtype)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


class _Attention(nn.Module):
    def __init__(self, shape: _Shape) -> None:
        super().__init__()
        self.heads, self.shared_heads = shape.heads, shape.shared_heads
        self.size = shape.width // shape.heads
        self.query = nn.Linear(shape.width, shape.width, bias=False)
        self.key = nn.Linear(shape.width, shape.shared_heads * self.size, bias=False)
        self.value = nn.Linear(shape.width, shape.shared_heads * self.size, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        places = torch.arange(hidden.shape[1], device=hidden.device, dtype=torch.float32)
        steps = torch.arange(0, self.size, 2, device=hidden.device, dtype=torch.float32)
        angles = places[:, None] * ROTARY_BASE ** (-steps / self.size)[None, :]
        mixed = scaled_dot_product_attention(
            _rotated(heads_first(self.query(hidden), self.heads), angles),
            _rotated(heads_first(self.key(hidden), self.shared_heads), angles),
            heads_first(self.value(hidden), self.shared_heads),
            is_causal=True,
            enable_gqa=self.heads != self.shared_heads,
        )
        out: Tensor = self.out(heads_last(mixed))
        return out


class _Block(nn.Module):
    def __init__(self, shape: _Shape) -> None:
        super().__init__()
        self.norm_1 = nn.RMSNorm(shape.width, eps=1e-5)
        self.attention = _Attention(shape)
        self.norm_2 = nn.RMSNorm(shape.width, eps=1e-5)
        self.gate = nn.Linear(shape.width, shape.inner, bias=False)
        self.up = nn.Linear(shape.width, shape.inner, bias=False)
        self.down = nn.Linear(shape.inner, shape.width, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.attention(self.norm_1(hidden))
        normed = self.norm_2(hidden)
        result: Tensor = hidden + self.down(silu(self.gate(normed)) * self.up(normed))
        return result


class Llama(nn.Module):
    """Token ids (rows, positions) -> logits (rows, positions, vocabulary)."""

    def __init__(self, shape: _Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, eps=1e-5)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token at every position."""
        hidden = self.tokens(ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))
        return logits


@task_function
def llama(
    seed: int = 0,
    *,
    size: str = "tiny",
    batch: int = 1,
    sequence: int | None = None,
    dtype: str = "float32",
) -> Task:
    """Llama with AdamW; sizes tiny, 1b, 7b, 13b, 70b; `dtype` of weights, such as bfloat16."""
    shape = preset("llama", size, SIZES)
    length = sequence or shape.positions
    return Task(
        model=Llama(shape).to(getattr(torch, dtype)),
        loss=next_token_loss,
        optimizer=adamw(3e-4),
        data=tokens(seed, batch, length, shape.vocabulary),
        unit="token",
        units_per_microbatch=batch * length,
    )
