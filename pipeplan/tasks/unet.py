"""U-Net: what goes down is kept for the way up, so many tensors cross the middle."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate, mse_loss

from pipeplan.task import Task, task_function
from pipeplan.tasks.data import images
from pipeplan.tasks.resnet import convolution
from pipeplan.tasks.training import adamw


def _double(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        convolution(inputs, outputs, 3), nn.ReLU(), convolution(outputs, outputs, 3), nn.ReLU()
    )


class UNet(nn.Module):
    """Images (rows, 3, side, side) -> images of the same shape."""

    def __init__(self, depth: int, width: int) -> None:
        super().__init__()
        channels = [width << level for level in range(depth + 1)]
        sources = [3, *channels]
        self.down = nn.ModuleList(_double(sources[n], sources[n + 1]) for n in range(depth))
        self.pool = nn.MaxPool2d(2)
        self.bottom = _double(channels[depth - 1], channels[depth])
        self.up = nn.ModuleList(
            _double(channels[n] + channels[n + 1], channels[n]) for n in reversed(range(depth))
        )
        self.out = nn.Conv2d(width, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        """The image predicted."""
        kept: list[Tensor] = []
        value = image
        for down in self.down:
            value = down(value)
            kept.append(value)
            value = self.pool(value)
        value = self.bottom(value)
        for up in self.up:
            value = up(torch.cat([kept.pop(), interpolate(value, scale_factor=2.0)], dim=1))
        result: Tensor = self.out(value)
        return result


@task_function
def unet(
    seed: int = 0, *, depth: int = 3, width: int = 16, batch: int = 2, side: int = 64
) -> Task:
    """A U-Net with AdamW that learns to smooth noisy images."""
    noisy = images(seed, batch, side, classes=10)

    def data(microbatch: int) -> tuple[Tensor, Tensor]:
        image, _ = noisy(microbatch)
        smooth = torch.nn.functional.avg_pool2d(image, 5, stride=1, padding=2)
        return image, smooth

    return Task(
        model=UNet(depth, width), loss=mse_loss, optimizer=adamw(1e-3), data=data, unit="image"
    )
