"""ResNets: basic blocks (18, 34) and bottlenecks (50, 101, 152)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipeplan.task import Task, task_function
from pipeplan.tasks.data import images
from pipeplan.tasks.training import momentum, preset

SIZES: dict[str | int, tuple[bool, tuple[int, ...]]] = {
    18: (False, (2, 2, 2, 2)),
    34: (False, (3, 4, 6, 3)),
    50: (True, (3, 4, 6, 3)),
    101: (True, (3, 4, 23, 3)),
    152: (True, (3, 8, 36, 3)),
}
"""Whether its blocks are bottlenecks, and how many each stage has."""


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Convolution that keeps the image's side over `stride`, and batch norm."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


class _Block(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        if bottleneck:
            self.body = nn.Sequential(
                convolution(inputs, width, 1),
                nn.ReLU(),
                convolution(width, width, 3, stride),
                nn.ReLU(),
                convolution(width, outputs, 1),
            )
        else:
            self.body = nn.Sequential(
                convolution(inputs, width, 3, stride), nn.ReLU(), convolution(width, width, 3)
            )
        same = stride == 1 and inputs == outputs
        self.skip = nn.Identity() if same else convolution(inputs, outputs, 1, stride)
        self.relu = nn.ReLU()

    def forward(self, value: Tensor) -> Tensor:
        result: Tensor = self.relu(self.body(value) + self.skip(value))
        return result


class ResNet(nn.Module):
    """Images (rows, 3, side, side) -> logits (rows, classes)."""

    def __init__(
        self, bottleneck: bool, blocks: tuple[int, ...], width: int, classes: int
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)
        )
        channels, factor = width, 4 if bottleneck else 1
        body: list[nn.Module] = []
        for stage, count in enumerate(blocks):
            for block in range(count):
                stride = 2 if stage and not block else 1
                body.append(_Block(channels, width << stage, stride, bottleneck))
                channels = factor * (width << stage)
        self.body = nn.Sequential(*body)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, classes)

    def forward(self, image: Tensor) -> Tensor:
        """Logits of the classes."""
        logits: Tensor = self.head(self.pool(self.body(self.stem(image))).flatten(1))
        return logits


@task_function
def resnet(
    seed: int = 0,
    *,
    size: int = 18,
    batch: int = 4,
    side: int = 64,
    width: int = 64,
    classes: int = 10,
) -> Task:
    """A ResNet with SGD and momentum; sizes 18, 34, 50, 101, 152; `width` channels at first."""
    bottleneck, blocks = preset("resnet", size, SIZES)
    return Task(
        model=ResNet(bottleneck, blocks, width, classes),
        loss=cross_entropy,
        optimizer=momentum(0.05),
        data=images(seed, batch, side, classes),
    )
