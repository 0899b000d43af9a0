"""A forward that replaces the memory behind a parameter is refused by name, and undone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipeplan.capture import profile_task
from pipeplan.errors import InputError
from pipeplan.task import Task
from tests.capture_tasks import sgd


class Decaying(nn.Linear):
    """Puts a smaller weight in its place at each call."""

    def forward(self, rows: Tensor) -> Tensor:
        self.weight.data = self.weight.data * 0.99
        return super().forward(rows)


class Inside(nn.Module):
    """Has one in the middle of its forward, which is cut as a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), Decaying(4, 4), nn.Linear(4, 4)

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = self.last(self.middle(self.first(rows)))
        return result


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4), Decaying(4, 4)), "1.weight"),
        (Inside, "middle.weight"),
    ],
)
def test_replaced_memory_is_refused(make: Callable[[], nn.Module], name: str) -> None:
    """It was left on meta, without values, and the message spoke of devices."""
    model, rows = make(), torch.ones(8, 4)
    kept = model.get_parameter(name).detach().clone()
    task = Task(
        model=model, loss=nn.functional.mse_loss, optimizer=sgd, data=lambda _: (rows, rows)
    )
    with pytest.raises(InputError, match=rf"parameter '{name}': its forward replaces the memory"):
        profile_task(task, repeats=1, warmup=0)
    assert torch.equal(model.get_parameter(name), kept)
