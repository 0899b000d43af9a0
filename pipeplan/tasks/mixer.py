"""MLP-mixer: patches mixed across places, then across channels."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipeplan.task import Task, task_function
from pipeplan.tasks.attention import Mlp
from pipeplan.tasks.data import images
from pipeplan.tasks.training import adamw, preset

SIZES: dict[str | int, tuple[int, int, int]] = {
    "tiny": (4, 64, 8),
    "base": (12, 768, 16),
    "large": (24, 1024, 16),
}
"""Layers, width, side of a patch."""


class _Block(nn.Module):
    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norm_1, self.across_places = nn.LayerNorm(width), Mlp(places, factor=2)
        self.norm_2, self.across_channels = nn.LayerNorm(width), Mlp(width)

    def forward(self, hidden: Tensor) -> Tensor:
        mixed = self.across_places(self.norm_1(hidden).transpose(1, 2)).transpose(1, 2)
        hidden = hidden + mixed
        result: Tensor = hidden + self.across_channels(self.norm_2(hidden))
        return result


class Mixer(nn.Module):
    """Images (rows, 3, side, side) -> logits (rows, classes)."""

    def __init__(self, size: tuple[int, int, int], side: int, classes: int) -> None:
        super().__init__()
        layers, width, patch = size
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.blocks = nn.ModuleList(_Block((side // patch) ** 2, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, image: Tensor) -> Tensor:
        """Logits of the classes."""
        hidden = self.patches(image).flatten(2).transpose(1, 2)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden).mean(dim=1))
        return logits


@task_function
def mixer(
    seed: int = 0, *, size: str = "tiny", batch: int = 4, side: int = 32, classes: int = 10
) -> Task:
    """An MLP-mixer with AdamW; sizes tiny, base, large."""
    return Task(
        model=Mixer(preset("mixer", size, SIZES), side, classes),
        loss=cross_entropy,
        optimizer=adamw(1e-3),
        data=images(seed, batch, side, classes),
    )
