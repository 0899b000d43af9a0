"""Inception-like: modules of four parallel branches whose outputs are joined."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipeplan.task import Task, task_function
from pipeplan.tasks.data import images
from pipeplan.tasks.resnet import convolution
from pipeplan.tasks.training import momentum


def _branch(*parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(*(layer for part in parts for layer in (part, nn.ReLU())))


class _Module(nn.Module):
    """1x1, 3x3 and twice 3x3 convolutions and pooling, each giving `width` channels."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.one = _branch(convolution(inputs, width, 1))
        self.three = _branch(convolution(inputs, width, 1), convolution(width, width, 3))
        self.five = _branch(
            convolution(inputs, width, 1),
            convolution(width, width, 3),
            convolution(width, width, 3),
        )
        self.pool = nn.Sequential(
            nn.MaxPool2d(3, stride=1, padding=1), _branch(convolution(inputs, width, 1))
        )

    def forward(self, value: Tensor) -> Tensor:
        branches = (self.one, self.three, self.five, self.pool)
        return torch.cat([branch(value) for branch in branches], dim=1)


class Inception(nn.Module):
    """Images (rows, 3, side, side) -> logits (rows, classes)."""

    def __init__(self, modules: int, width: int, classes: int) -> None:
        super().__init__()
        self.stem = _branch(convolution(3, width, 3, 2), convolution(width, 2 * width, 3))
        channels = 2 * width
        body: list[nn.Module] = []
        for index in range(modules):
            if index and index % 3 == 0:
                body.append(nn.MaxPool2d(2))
                width *= 2
            body.append(_Module(channels, width))
            channels = 4 * width
        self.body = nn.ModuleList(body)
        self.head = nn.Linear(channels, classes)

    def forward(self, image: Tensor) -> Tensor:
        """Logits of the classes."""
        value = self.stem(image)
        for module in self.body:
            value = module(value)
        logits: Tensor = self.head(value.mean(dim=(2, 3)))
        return logits


@task_function
def inception(
    seed: int = 0,
    *,
    modules: int = 6,
    width: int = 16,
    batch: int = 4,
    side: int = 64,
    classes: int = 10,
) -> Task:
    """Inception modules in a row with SGD and momentum."""
    return Task(
        model=Inception(modules, width, classes),
        loss=cross_entropy,
        optimizer=momentum(0.05),
        data=images(seed, batch, side, classes),
    )
