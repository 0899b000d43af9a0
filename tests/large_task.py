"""Tasks of any size, as a row of layers and exported; their first weights from anywhere."""

from __future__ import annotations

import torch
from torch import Tensor, nn, optim

from pipeplan.task import Task, task_function


def _data(width: int, number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    rows = torch.randn(4, width, generator=generator)
    return rows, rows.sum(1, keepdim=True)


class _Net(nn.Module):
    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.head = nn.Linear(width, 1)

    def forward(self, rows: Tensor) -> Tensor:
        for block in self.blocks:
            rows = torch.tanh(block(rows))
        out: Tensor = self.head(rows)
        return out


def _row(blocks: int, width: int) -> nn.Module:
    hidden = [layer for _ in range(blocks) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(*hidden, nn.Linear(width, 1))


@task_function
def large(
    form: str = "row", blocks: int = 16, width: int = 1024, weights: str | None = None
) -> Task:
    """`blocks` of width x width, 4 MiB each as they are; `form` is `row` or `exported`."""
    return Task(
        model=_row(blocks, width) if form == "row" else _Net(blocks, width),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: optim.SGD(parameters, lr=1e-3, foreach=False),
        data=lambda number: _data(width, number),
        weights=weights,
    )
