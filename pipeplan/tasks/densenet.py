"""DenseNet: every layer of a block sees the outputs of all layers before it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipeplan.task import Task, task_function
from pipeplan.tasks.data import images
from pipeplan.tasks.training import momentum, preset

SIZES: dict[str | int, tuple[int, tuple[int, ...]]] = {
    "tiny": (8, (2, 3, 2)),
    121: (32, (6, 12, 24, 16)),
    161: (48, (6, 12, 36, 24)),
    201: (32, (6, 12, 48, 32)),
}
"""Growth, and layers of each block."""


def _before(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    """Batch norm and ReLU before the convolution, as DenseNet orders them."""
    return nn.Sequential(
        nn.BatchNorm2d(inputs),
        nn.ReLU(),
        nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False),
    )


class _Layer(nn.Module):
    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.squeeze = _before(inputs, 4 * growth, 1)
        self.grow = _before(4 * growth, growth, 3)

    def forward(self, value: Tensor) -> Tensor:
        return torch.cat([value, self.grow(self.squeeze(value))], dim=1)


class DenseNet(nn.Module):
    """Images (rows, 3, side, side) -> logits (rows, classes)."""

    def __init__(self, growth: int, blocks: tuple[int, ...], classes: int) -> None:
        super().__init__()
        channels = 2 * growth
        body: list[nn.Module] = [
            nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
        for index, layers in enumerate(blocks):
            if index:
                body += [_before(channels, channels // 2, 1), nn.AvgPool2d(2)]
                channels //= 2
            for _ in range(layers):
                body.append(_Layer(channels, growth))
                channels += growth
        self.body = nn.Sequential(*body, nn.BatchNorm2d(channels), nn.ReLU())
        self.head = nn.Linear(channels, classes)

    def forward(self, image: Tensor) -> Tensor:
        """Logits of the classes."""
        logits: Tensor = self.head(self.body(image).mean(dim=(2, 3)))
        return logits


@task_function
def densenet(
    seed: int = 0, *, size: int | str = "tiny", batch: int = 4, side: int = 64, classes: int = 10
) -> Task:
    """A DenseNet with SGD and momentum; sizes tiny, 121, 161, 201."""
    growth, blocks = preset("densenet", size, SIZES)
    return Task(
        model=DenseNet(growth, blocks, classes),
        loss=cross_entropy,
        optimizer=momentum(0.05),
        data=images(seed, batch, side, classes),
    )
