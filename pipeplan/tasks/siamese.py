"""Siamese: one network sees two images, both copies share every weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from pipeplan.task import Task, task_function
from pipeplan.tasks.data import images
from pipeplan.tasks.resnet import convolution
from pipeplan.tasks.training import adamw


class Siamese(nn.Module):
    """Pairs of images (rows, 2, 3, side, side) -> logits (rows,) that both show one class.

    The two branches use the same weights one after the other, so their layers share a GPU; the
    head that compares them is free to sit elsewhere.
    """

    def __init__(self, layers: int, width: int, head_layers: int) -> None:
        super().__init__()
        body: list[nn.Module] = [convolution(3, width, 5, 2), nn.ReLU()]
        for _ in range(layers - 1):
            body += [convolution(width, width, 3), nn.ReLU()]
        self.trunk = nn.Sequential(*body, nn.AdaptiveAvgPool2d(4), nn.Flatten())
        size = 16 * width
        head = [part for _ in range(head_layers) for part in (nn.Linear(size, size), nn.ReLU())]
        self.head = nn.Sequential(*head, nn.Linear(size, 1))

    def forward(self, pair: Tensor) -> Tensor:
        """Logit of each pair."""
        left, right = self.trunk(pair[:, 0]), self.trunk(pair[:, 1])
        logits: Tensor = self.head((left - right).abs()).squeeze(1)
        return logits


@task_function
def siamese(
    seed: int = 0,
    *,
    layers: int = 4,
    width: int = 16,
    head_layers: int = 3,
    batch: int = 4,
    side: int = 32,
) -> Task:
    """Two images, one trunk, AdamW: do both show the same class?"""
    single = images(seed, 2 * batch, side, classes=2)

    def data(microbatch: int) -> tuple[Tensor, Tensor]:
        image, label = single(microbatch)
        pairs = image.unflatten(0, (batch, 2))
        same = (label[0::2] == label[1::2]).to(torch.float32)
        return pairs, same

    return Task(
        model=Siamese(layers, width, head_layers),
        loss=binary_cross_entropy_with_logits,
        optimizer=adamw(1e-3),
        data=data,
        unit="pair",
    )
