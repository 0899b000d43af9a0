"""Vision transformer: patches of an image as tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipeplan.task import Task, task_function
from pipeplan.tasks.attention import Block
from pipeplan.tasks.data import images
from pipeplan.tasks.training import adamw, preset

SIZES: dict[str | int, tuple[int, int, int, int]] = {
    "tiny": (4, 64, 4, 8),
    "base": (12, 768, 12, 16),
    "large": (24, 1024, 16, 16),
    "huge": (32, 1280, 16, 14),
}
"""Layers, width, heads, side of a patch."""


class Vit(nn.Module):
    """Images (rows, 3, side, side) -> logits (rows, classes), read from a class token."""

    def __init__(
        self, size: tuple[int, int, int, int], side: int, classes: int, dropout: float
    ) -> None:
        super().__init__()
        layers, width, heads, patch = size
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (side // patch) ** 2 + 1, width))
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout=dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, image: Tensor) -> Tensor:
        """Logits of the classes."""
        patches = self.patches(image).flatten(2).transpose(1, 2)
        token = self.token.expand(patches.shape[0], -1, -1)
        hidden = self.drop(torch.cat([token, patches], dim=1) + self.positions)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden)[:, 0])
        return logits


@task_function
def vit(
    seed: int = 0,
    *,
    size: str = "tiny",
    batch: int = 4,
    side: int = 32,
    classes: int = 10,
    dropout: float = 0.1,
) -> Task:
    """A vision transformer with AdamW; sizes tiny, base, large, huge."""
    return Task(
        model=Vit(preset("vit", size, SIZES), side, classes, dropout),
        loss=cross_entropy,
        optimizer=adamw(1e-3),
        data=images(seed, batch, side, classes),
    )
