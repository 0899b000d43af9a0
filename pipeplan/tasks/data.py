"""Synthetic micro-batches that can be learned; a number gives the same tensors everywhere."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Data = Callable[[int], tuple[Tensor, Tensor]]

CONTRAST = 0.5
"""Strength of a class's pattern in an image of unit noise."""


def generator(seed: int, microbatch: int) -> torch.Generator:
    """The source of randomness of one micro-batch."""
    return torch.Generator("cpu").manual_seed(seed * 1_000_003 + microbatch)


def images(seed: int, batch: int, side: int, classes: int) -> Data:
    """Noise plus a faint pattern per class: floats (batch, 3, side, side) and labels (batch,)."""
    # On the CPU even where the model is built without memory.
    patterns = torch.randn(classes, 3, 8, 8, generator=generator(seed, -1), device="cpu")

    def data(microbatch: int) -> tuple[Tensor, Tensor]:
        source = generator(seed, microbatch)
        labels = torch.randint(classes, (batch,), generator=source)
        noise = torch.randn(batch, 3, side, side, generator=source)
        pattern = torch.nn.functional.interpolate(patterns[labels], size=(side, side))
        return noise + CONTRAST * pattern, labels

    return data


def tokens(seed: int, batch: int, sequence: int, vocabulary: int) -> Data:
    """Arithmetic sequences of random step: ids (batch, sequence) and the ids that follow them."""

    def data(microbatch: int) -> tuple[Tensor, Tensor]:
        source = generator(seed, microbatch)
        start = torch.randint(vocabulary, (batch, 1), generator=source)
        step = torch.randint(1, 8, (batch, 1), generator=source)
        row = (start + step * torch.arange(sequence + 1)) % vocabulary
        return row[:, :-1], row[:, 1:]

    return data
