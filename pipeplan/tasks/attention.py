"""Multi-head attention and the MLP of transformers, shared by several tasks."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


def heads_first(value: Tensor, heads: int) -> Tensor:
    """(rows, positions, width) -> (rows, heads, positions, width / heads)."""
    rows, positions, _ = value.shape
    return value.view(rows, positions, heads, -1).transpose(1, 2)


def heads_last(value: Tensor) -> Tensor:
    """The inverse of `heads_first`."""
    return value.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """Attention of `value` to `memory`, by default to itself; (rows, positions, width)."""

    def __init__(
        self, width: int, heads: int, *, dropout: float = 0.0, causal: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, value: Tensor, memory: Tensor | None = None) -> Tensor:
        """Attend; same shape as `value`."""
        key, content = self.key_value(value if memory is None else memory).chunk(2, dim=-1)
        mixed = scaled_dot_product_attention(
            heads_first(self.query(value), self.heads),
            heads_first(key, self.heads),
            heads_first(content, self.heads),
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=self.causal,
        )
        out: Tensor = self.out(heads_last(mixed))
        return out


class Mlp(nn.Sequential):
    """Two linear layers around GELU, four times as wide inside."""

    def __init__(self, width: int, *, dropout: float = 0.0, factor: int = 4) -> None:
        super().__init__(
            nn.Linear(width, factor * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(factor * width, width),
            nn.Dropout(dropout),
        )


class Block(nn.Module):
    """A pre-norm transformer block: attention and MLP, each added to its input."""

    def __init__(
        self, width: int, heads: int, *, dropout: float = 0.0, causal: bool = False
    ) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout=dropout, causal=causal)
        self.drop = nn.Dropout(dropout)
        self.norm_2 = nn.LayerNorm(width)
        self.mlp = Mlp(width, dropout=dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """(rows, positions, width) -> the same shape."""
        hidden = hidden + self.drop(self.attention(self.norm_1(hidden)))
        result: Tensor = hidden + self.mlp(self.norm_2(hidden))
        return result
