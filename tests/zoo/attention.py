"""Attention with masks, experts, shared blocks, sets, series."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy, mse_loss

from tests.zoo.architecture import (
    LENGTH,
    WORDS,
    Architecture,
    classes,
    floats,
    mask,
    supervised,
)
from tests.zoo.recurrent import labelled, next_word, words

WIDTH, HEADS = 16, 4


class Translator(nn.Module):
    """`nn.Transformer` with a causal mask and masks of padding, as its tutorial has it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.inner = nn.Transformer(WIDTH, HEADS, 2, 2, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, source: Tensor, given: Tensor, padding: Tensor) -> Tensor:
        places = self.places(torch.arange(LENGTH))
        causal = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        made = self.inner(
            self.words(source) + places,
            self.words(given) + places,
            tgt_mask=causal,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
            tgt_is_causal=True,
        )
        return self.out(made)


def translations(number: int) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Source, target shifted, where the source is padding; the target."""
    given, wanted = words(number)
    return (classes(number + 9, WORDS, LENGTH), given, mask(number) == 0), wanted


class Classifier(nn.Module):
    """`nn.TransformerEncoder` with a mask of padding, in a dict with the ids."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 32, dropout=0.0, batch_first=True, norm_first=True
        )
        self.inner = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.out = nn.Linear(WIDTH, 5)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        value = self.inner(self.words(batch["ids"]), src_key_padding_mask=batch["mask"] == 0)
        return {"logits": self.out(value[:, 0]), "hidden": value}


def dictionaries(number: int) -> tuple[tuple[dict[str, Tensor]], dict[str, Tensor]]:
    """One dict as the only positional argument, one as the target."""
    return ({"ids": labelled(number)[0], "mask": mask(number)},), {"label": labelled(number)[1]}


def of_dictionaries(outputs: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    """Class, and small hidden values."""
    return (
        cross_entropy(outputs["logits"], target["label"])
        + 1e-3 * outputs["hidden"].square().mean()
    )


class Experts(nn.Module):
    """Each token goes to its best two of four experts, whose use is balanced (Shazeer 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(4)
        )

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor]:
        flat = value.flatten(0, 1)
        shares = self.gate(flat).softmax(-1)
        weights, chosen = shares.topk(2, -1)
        made = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows, which = torch.where(chosen == number)
            if rows.numel():
                made.index_add_(0, rows, weights[rows, which, None] * expert(flat[rows]))
        used = functional.one_hot(chosen[:, 0], 4).float().mean(0)
        return value + made.view_as(value), 4 * (used * shares.mean(0)).sum()


class ExpertModel(nn.Module):
    """Two blocks of attention and experts; returns logits and the balance of all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) for _ in range(2)
        )
        self.experts = nn.ModuleList(Experts() for _ in range(2))
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        value, balance = self.words(ids), torch.zeros(())
        for attention, experts in zip(self.attention, self.experts, strict=True):
            value = value + attention(value, value, value, need_weights=False)[0]
            value, more = experts(value)
            balance = balance + more
        return self.out(value), balance


def balanced(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """Next words, and experts that are used alike."""
    return next_word(outputs[0], target) + 0.01 * outputs[1]


class Universal(nn.Module):
    """One block that runs four times (Dehghani et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.block = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, dropout=0.0, batch_first=True)
        self.out = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        value = self.words(ids)
        for _ in range(4):
            value = self.block(value)
        return self.out(value)


class TiedWords(nn.Module):
    """The table of words is the last layer's weight; ALiBi in place of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.mlp = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH)
            )
            for _ in range(2)
        )
        self.out = nn.Linear(WIDTH, WORDS, bias=False)
        self.out.weight = self.words.weight
        far = torch.arange(LENGTH)[None] - torch.arange(LENGTH)[:, None]
        slopes = 2.0 ** -torch.arange(1, HEADS + 1)[:, None, None]
        bias = (slopes * far).masked_fill(far > 0, -math.inf)
        self.register_buffer("bias", bias)

    def forward(self, ids: Tensor) -> Tensor:
        value = self.words(ids)
        for qkv, mlp in zip(self.qkv, self.mlp, strict=True):
            heads = qkv(value).view(*ids.shape, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            made = functional.scaled_dot_product_attention(*heads, attn_mask=self.bias)
            value = value + made.transpose(1, 2).flatten(2)
            value = value + mlp(value)
        return self.out(value)


class SetPool(nn.Module):
    """Points in any order: a maximum over points, attention from learned queries."""

    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Sequential(nn.Linear(3, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.queries = nn.Parameter(torch.randn(4, WIDTH))
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.out = nn.Linear(2 * WIDTH, 5)

    def forward(self, points: Tensor) -> Tensor:
        value = self.point(points)
        queries = self.queries.expand(len(points), -1, -1)
        pooled, _ = self.attention(queries, value, value)
        return self.out(torch.cat([value.amax(1), pooled.mean(1)], -1))


class Forecast(nn.Module):
    """Normalised per series, in patches, back to its scale at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, WIDTH)
        self.mixing = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        self.out = nn.Linear(6 * WIDTH, 8)

    def forward(self, series: Tensor) -> Tensor:
        mean, scale = series.mean(-1, keepdim=True), series.std(-1, keepdim=True) + 1e-5
        patches = self.inside(((series - mean) / scale).unflatten(-1, (6, 8)))
        made = self.out((patches + self.mixing(patches)).flatten(-2))
        return made * scale + mean


ATTENTION = (
    Architecture("nn.Transformer with masks", supervised(Translator, next_word, translations)),
    Architecture(
        "transformer encoder, dicts as input, target and output",
        supervised(Classifier, of_dictionaries, dictionaries),
    ),
    Architecture(
        "mixture of experts with a balance loss", supervised(ExpertModel, balanced, words)
    ),
    Architecture(
        "universal transformer, one block four times", supervised(Universal, next_word, words)
    ),
    Architecture("tied words and alibi", supervised(TiedWords, next_word, words)),
    Architecture(
        "points, set pooling",
        supervised(SetPool, cross_entropy, lambda n: (floats(n, 20, 3), classes(n, 5))),
    ),
    Architecture(
        "forecasting in patches",
        supervised(Forecast, mse_loss, lambda n: (floats(n, 3, 48), floats(n + 50, 3, 8))),
    ),
)
