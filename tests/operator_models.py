"""Small models of many kinds, each with the arguments of one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan import tasks
from pipeplan.task import Task
from pipeplan.tasks.attention import Block
from tests import short_networks


@dataclass(frozen=True)
class Model:
    """A module in training mode, and a call of it."""

    module: nn.Module
    args: tuple[Any, ...]
    cast: torch.dtype | None = None
    """To be called under autocast to this type."""


def of_task(task: Task) -> Model:
    """A task's model with its loss."""
    source, target = task.data(0)
    assert isinstance(task.model, nn.Module)
    return Model(WithLoss(task.model, task.loss), (source, target))


class WithLoss(nn.Module):
    """A model and its loss."""

    def __init__(self, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """The loss."""
        return self.loss(self.model(source), target)


class ExplicitAttention(nn.Module):
    """Scores, softmax and dropout as operators of their own."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.all = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.drop = nn.Dropout(dropout)
        self.register_buffer("mask", torch.full((64, 64), -torch.inf).triu(1))

    def forward(self, value: Tensor) -> Tensor:
        """Same shape."""
        batch, length, width = value.shape
        parts = self.all(value).view(batch, length, 3, self.heads, width // self.heads)
        query, key, content = parts.permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) / (width // self.heads) ** 0.5
        scores = scores + self.mask[:length, :length]
        mixed = self.drop(scores.softmax(-1)) @ content
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return result


class Gpt(nn.Module):
    """A GPT with explicit attention; `dropout` everywhere."""

    def __init__(self, layers: int, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.LayerNorm(width),
                    ExplicitAttention(width, heads, dropout),
                    nn.LayerNorm(width),
                    nn.Sequential(
                        nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
                    ),
                    nn.Dropout(dropout),
                ]
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, 64, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits."""
        value = self.tokens(ids)
        for before, attention, behind, mlp, drop in self.blocks:  # type: ignore[misc]
            value = value + drop(attention(before(value)))
            value = value + drop(mlp(behind(value)))
        result: Tensor = self.head(value)
        return result


class Bert(nn.Module):
    """torch's own encoder, with a mask of padded places and two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.pooled, self.words = nn.Linear(32, 2), nn.Linear(32, 64)

    def forward(self, ids: Tensor, padded: Tensor) -> dict[str, Tensor]:
        """Logits of the sentence and of the words."""
        hidden = self.encoder(self.tokens(ids), src_key_padding_mask=padded)
        return {"pooled": self.pooled(hidden[:, 0]).tanh(), "words": self.words(hidden)}


class InPlace(nn.Module):
    """Writes into its own tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, value: Tensor) -> Tensor:
        """Same shape."""
        hidden = functional.relu_(self.first(value))
        with torch.no_grad():
            self.seen.mul_(0.9).add_(hidden.mean(0), alpha=0.1)
        hidden = hidden.clone()
        hidden[:, :4] *= 2
        hidden.add_(1)
        result: Tensor = self.second(hidden)
        return result


class Swish(torch.autograd.Function):
    """A function with a backward of its own."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        ctx.save_for_backward(value)
        return value * value.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (value,) = ctx.saved_tensors
        share = value.sigmoid()
        result: Tensor = gradient * share * (1 + value * (1 - share))
        return result


class Custom(nn.Module):
    """Uses it, and a parameter whose gradient is that of an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.shift = nn.Parameter(torch.ones(4, 8))

    def forward(self, value: Tensor) -> Tensor:
        """Same shape."""
        return Swish.apply(self.first(value)) + self.second(value) + self.shift  # type: ignore[no-any-return, no-untyped-call]


class Lstm(nn.Module):
    """Two recurrent layers; returns the states, too."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(8, 16, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(16, 4)

    def forward(self, value: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Logits and the last states."""
        hidden, states = self.cells(value)
        return self.head(hidden), states


class Frozen(nn.Module):
    """Has weights that do not train, and outputs that need no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.body.requires_grad_(False)
        self.norm = nn.BatchNorm1d(8).eval()

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and their class."""
        logits = self.head(self.norm(self.body(value)))
        return logits, logits.argmax(-1)


def _ids(*shape: int) -> Tensor:
    return torch.randint(64, shape)


def _values(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*shape).requires_grad_(grad)


def _tied() -> Model:
    return of_task(short_networks.gpt2(batch=2, sequence=16, tied=True))


def _residual() -> Model:
    return of_task(short_networks.resnet(batch=2, side=16, width=4))


MODELS: dict[str, Callable[[], Model]] = {
    "gpt, explicit attention": lambda: Model(Gpt(2, 32, 4, 0.1), (_ids(2, 16),)),
    "gpt, dropout of zero": lambda: Model(Gpt(1, 32, 4, 0.0), (_ids(2, 16),)),
    "gpt, fused attention": lambda: Model(
        nn.Sequential(*(Block(32, 4, dropout=0.0, causal=True) for _ in range(2))),
        (_values(2, 16, 32, grad=True),),
    ),
    "gpt2, tied weights": _tied,
    "llama": lambda: of_task(short_networks.llama(sequence=16, blocks=1)),
    "bert": lambda: Model(Bert(), (_ids(2, 16), torch.arange(16).expand(2, 16) > 12)),
    "t5": lambda: of_task(short_networks.t5(sequence=8)),
    "vit": lambda: of_task(short_networks.vit(batch=2, side=16, blocks=1)),
    "resnet": _residual,
    "densenet": lambda: of_task(short_networks.densenet(batch=2, side=16)),
    "u-net": lambda: of_task(tasks.unet(depth=2, width=4, batch=2, side=16)),
    "mixer": lambda: of_task(short_networks.mixer(batch=2, side=16, blocks=1)),
    "lstm": lambda: Model(Lstm(), (_values(3, 5, 8, grad=True),)),
    "in place": lambda: Model(InPlace(), (_values(4, 8, grad=True),)),
    "custom function": lambda: Model(Custom(), (_values(4, 8),)),
    "autocast": lambda: Model(Gpt(1, 32, 4, 0.1), (_ids(2, 16),), torch.bfloat16),
    "frozen weights": lambda: Model(Frozen(), (_values(4, 8, grad=True),)),
    "siamese": lambda: of_task(tasks.siamese(layers=2, width=4, batch=2, side=16)),
    "cross-modal": lambda: of_task(
        tasks.crossmodal(layers=1, width=16, heads=2, batch=2, side=16, letters=8)
    ),
}


def model(name: str) -> Model:
    """The same weights and arguments each time."""
    torch.manual_seed(0)
    return MODELS[name]()
