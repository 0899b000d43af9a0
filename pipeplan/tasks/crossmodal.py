"""Cross-modal: an image and a text, each with its encoder, joined by a third network."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipeplan.task import Task, task_function
from pipeplan.tasks.attention import Attention, Block, Mlp
from pipeplan.tasks.data import generator
from pipeplan.tasks.training import adamw

LETTERS = 256
"""Text is bytes."""


class _Fusion(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.cross, self.mlp = Attention(width, heads), Mlp(width)

    def forward(self, text: Tensor, image: Tensor) -> Tensor:
        text = text + self.cross(self.norm_1(text), image)
        result: Tensor = text + self.mlp(self.norm_2(text))
        return result


class CrossModal(nn.Module):
    """Bytes (rows, 3 * side * side + letters), pixels before text -> logits (rows, classes)."""

    def __init__(self, layers: int, width: int, heads: int, side: int, classes: int) -> None:
        super().__init__()
        self.side = side
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.image = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.letters = nn.Embedding(LETTERS, width)
        self.text = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.fusion = nn.ModuleList(_Fusion(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, classes)

    def forward(self, packed: Tensor) -> Tensor:
        """Logits of the classes."""
        pixels, letters = packed.tensor_split([3 * self.side**2], dim=1)
        image = pixels.unflatten(1, (3, self.side, self.side)).to(torch.float32) / 128 - 1
        seen = self.patches(image).flatten(2).transpose(1, 2)
        for block in self.image:
            seen = block(seen)
        text = self.letters(letters.long())
        for block in self.text:
            text = block(text)
        for block in self.fusion:
            text = block(text, seen)
        logits: Tensor = self.head(text.mean(dim=1))
        return logits


@task_function
def crossmodal(
    seed: int = 0,
    *,
    layers: int = 2,
    width: int = 64,
    heads: int = 4,
    batch: int = 4,
    side: int = 32,
    letters: int = 16,
) -> Task:
    """An image and a text with AdamW: is the text's first letter the image's brightness?"""

    def data(microbatch: int) -> tuple[Tensor, Tensor]:
        source = generator(seed, microbatch)
        bright = torch.randint(LETTERS - 64, (batch, 1), generator=source)
        noise = torch.randint(64, (batch, 3 * side**2), generator=source)
        text = torch.randint(LETTERS, (batch, letters), generator=source)
        same = torch.randint(2, (batch,), generator=source)
        text[:, 0] = torch.where(same == 1, bright[:, 0] + 32, text[:, 0])
        return torch.cat([bright + noise, text], dim=1).to(torch.uint8), same

    return Task(
        model=CrossModal(layers, width, heads, side, classes=2),
        loss=cross_entropy,
        optimizer=adamw(1e-3),
        data=data,
    )
