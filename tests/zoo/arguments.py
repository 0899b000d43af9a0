"""What models are called with and return: labels, plain values, texts, dicts."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy, mse_loss

from tests.zoo.architecture import ROWS, WORDS, Architecture, classes, floats, supervised

WIDTH = 16


def mlp(inside: int, outside: int, wide: int = 32) -> nn.Sequential:
    """Two linear layers."""
    return nn.Sequential(nn.Linear(inside, wide), nn.GELU(), nn.Linear(wide, outside))


def rows(number: int) -> tuple[Tensor, Tensor]:
    """Features and classes."""
    return floats(number, WIDTH), classes(number, 5)


def same(number: int) -> tuple[Tensor, None]:
    """No target."""
    return floats(number, WIDTH), None


class OwnLoss(nn.Module):
    """Computes its loss where it gets labels."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = (
            nn.Sequential(mlp(WIDTH, WIDTH), mlp(WIDTH, WIDTH)),
            nn.Linear(WIDTH, 5),
        )

    def forward(self, features: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        logits = self.head(self.body(features))
        loss = None if labels is None else cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits, "names": ["a", "b"]}


class Variational(nn.Module):
    """An autoencoder that draws (Kingma, Welling 2014)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(WIDTH, 8), mlp(4, WIDTH)

    def forward(self, value: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, spread = self.encoder(value).chunk(2, -1)
        drawn = mean + torch.randn_like(mean) * torch.exp(spread / 2)
        return value, self.decoder(drawn), mean, spread


def evidence(outputs: tuple[Tensor, ...], _: None) -> Tensor:
    """The bound of the evidence; there is no target."""
    value, made, mean, spread = outputs
    return mse_loss(made, value) - 0.05 * (1 + spread - mean.square() - spread.exp()).mean()


class TwoTowers(nn.Module):
    """Query and item from two networks, compared with all others of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.item = mlp(WIDTH, WIDTH), nn.EmbeddingBag(WORDS, WIDTH)
        self.deep, self.scale = mlp(WIDTH, WIDTH), nn.Parameter(torch.tensor(math.log(10)))

    def forward(self, query: Tensor, item: Tensor) -> Tensor:
        one = functional.normalize(self.query(query), dim=-1)
        other = functional.normalize(self.deep(self.item(item)), dim=-1)
        return self.scale.exp() * one @ other.T


def in_batch(logits: Tensor, _: None) -> Tensor:
    """Each query belongs to its own item."""
    return cross_entropy(logits, torch.arange(len(logits)))


class Denoiser(nn.Module):
    """Denoises at a step of the diffusion, which comes as a plain number or a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.middle, self.out = (
            nn.Linear(WIDTH, 32),
            mlp(32, 32),
            nn.Linear(32, WIDTH),
        )

    def forward(
        self, value: Tensor, step: int | Tensor, scale: float = 1.0, *, mode: str = "eps"
    ) -> Tensor:
        far = torch.as_tensor(step).float().reshape(-1, 1) / 10
        value = torch.tanh(self.inside(value)) + torch.sin(far)
        return self.out(self.middle(value)) * (scale if mode == "eps" else 1.0)


class Tokenizing(nn.Module):
    """Takes texts, and looks up their words itself."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.EmbeddingBag(WORDS, WIDTH), mlp(WIDTH, 5)

    def forward(self, texts: list[str] | Tensor) -> Tensor:
        ids = texts if isinstance(texts, Tensor) else ids_of(texts)
        return self.out(self.words(ids))


def ids_of(texts: list[str]) -> Tensor:
    """Of three words each."""
    return torch.tensor([[sum(map(ord, word)) % WORDS for word in text.split()] for text in texts])


def texts(number: int) -> list[str]:
    """Two texts of three words."""
    names = ["red", "green", "blue", "cyan", "black"]
    return [" ".join(names[(number * 2 + i + j) % 5] for j in range(3)) for i in range(ROWS)]


class Heads(nn.Module):
    """Several tasks at once; one of them counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(mlp(WIDTH, WIDTH), nn.ReLU(), mlp(WIDTH, WIDTH))
        self.heads = nn.ModuleDict({"kind": nn.Linear(WIDTH, 5), "size": nn.Linear(WIDTH, 1)})

    def forward(self, value: Tensor) -> dict[str, Tensor]:
        value = self.trunk(value)
        return {name: head(value) for name, head in self.heads.items()}


def both(outputs: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    """The sum of both losses."""
    return cross_entropy(outputs["kind"], target["kind"]) + mse_loss(
        outputs["size"], target["size"]
    )


ARGUMENTS = (
    Architecture(
        "labels inside the model",
        supervised(OwnLoss, None, lambda n: {"features": rows(n)[0], "labels": rows(n)[1]}),
    ),
    Architecture(
        "no target, variational autoencoder", supervised(Variational, evidence, same), draws=True
    ),
    Architecture(
        "two towers, no target",
        supervised(
            TwoTowers,
            in_batch,
            lambda n: ({"query": floats(n, WIDTH), "item": classes(n, WORDS, 3)}, None),
        ),
    ),
    Architecture(
        "plain arguments, a step number",
        supervised(
            Denoiser, mse_loss, lambda n: ((floats(n, WIDTH), 3, 0.5), floats(n + 9, WIDTH))
        ),
    ),
    Architecture(
        "plain arguments, a step number of each micro-batch",
        supervised(Denoiser, mse_loss, lambda n: ((floats(n, WIDTH), n), floats(n + 9, WIDTH))),
        "the number as a tensor",
        supervised(
            Denoiser,
            mse_loss,
            lambda n: ((floats(n, WIDTH), torch.tensor(n)), floats(n + 9, WIDTH)),
        ),
    ),
    Architecture(
        "texts that the model tokenizes",
        supervised(Tokenizing, cross_entropy, lambda n: ((texts(n),), classes(n, 5))),
        "tokenized in data",
        supervised(Tokenizing, cross_entropy, lambda n: (ids_of(texts(n)), classes(n, 5))),
    ),
    Architecture(
        "several tasks, dict of targets",
        supervised(
            Heads,
            both,
            lambda n: (floats(n, WIDTH), {"kind": classes(n, 5), "size": floats(n, 1)}),
        ),
    ),
)
