"""Models whose constructors do what constructors do: draw, cast, copy, tie, and look at values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

WIDTH = 32


def _row(count: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def drawn() -> nn.Module:
    """Every initialiser of torch that draws."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(9)))
    ways: list[Callable[[Tensor], object]] = [
        nn.init.xavier_normal_,
        nn.init.kaiming_uniform_,
        nn.init.orthogonal_,
        lambda weight: nn.init.sparse_(weight, 0.3),
        lambda weight: weight.data.bernoulli_(0.2),
        lambda weight: weight.data.exponential_().log_().clamp_(-1, 1),
        lambda weight: weight.data.random_(7),
        lambda weight: nn.init.eye_(weight),
        lambda weight: weight.data[:3].normal_(),
    ]
    for layer, way in zip(model, ways, strict=True):
        way(layer.weight)
    return model


def truncated() -> nn.Module:
    """Draws again until all values are within bounds: how often follows from the values."""
    model = _row()
    for layer in model:
        nn.init.trunc_normal_(layer.weight, std=0.02)
        nn.init.trunc_normal_(layer.bias, std=1.0, a=1.5, b=2.0)
    return model


class Given(nn.Module):
    """Parameters made of tensors, other data for them, a tie, a buffer of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = nn.Parameter(0.02 * torch.randn(WIDTH, WIDTH))
        self.words = nn.Embedding(50, WIDTH, padding_idx=3)
        self.attention = nn.MultiheadAttention(WIDTH, 4)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("noise", torch.randn(5))
        self.like = nn.Buffer(torch.ones_like(self.scaled))
        self.scaled.data = torch.randn(WIDTH, WIDTH)
        self.scaled.data.mul_(2)
        self.last = nn.Linear(WIDTH, 50)
        self.last.weight = self.words.weight


def given() -> nn.Module:
    """`Given` in another type."""
    return Given().to(torch.bfloat16)


def copies() -> nn.Module:
    """Layers that are copies of one that is thrown away."""
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 64), 3)


def spectral() -> nn.Module:
    """Buffers follow from weights."""
    return nn.Sequential(*(parametrizations.spectral_norm(layer) for layer in _row()))


def weight_norm() -> nn.Module:
    """Parameters follow from parameters."""
    return nn.Sequential(*(parametrizations.weight_norm(layer) for layer in _row()))


def looked_at() -> nn.Module:
    """A number is taken out of each weight, the last one is scaled by the first one's."""
    model = _row()
    for layer in model:
        layer.scale = layer.weight.norm().item()
    model[2].weight.data.mul_(model[0].weight.norm().item())
    return model


def kept() -> nn.Module:
    """Attributes that are copies and views of weights elsewhere."""
    model = _row()
    model[0].start = model[2].weight.detach().clone()
    model[1].register_buffer("average", model[0].weight.detach().clone())
    model[2].view = model[0].weight[:3]
    with torch.no_grad():
        model[2].weight.copy_(model[1].weight)
    return model


def by_numpy() -> nn.Module:
    """Written into behind torch's back."""
    model = _row()
    model[1].weight.detach().numpy()[:] = 3
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    make.__name__: make
    for make in (
        drawn,
        truncated,
        given,
        copies,
        spectral,
        weight_norm,
        looked_at,
        kept,
        by_numpy,
    )
}
