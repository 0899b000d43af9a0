"""Layers of one build of a model get the tensors of the next one, or are left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn, optim

from pipeplan.capture import split
from pipeplan.capture.partition.rebound import rebound
from pipeplan.task import Task

WIDTH = 4


class Net(nn.Module):
    """Two layers and a norm."""

    def __init__(self, inside: int = WIDTH, *, tied: bool = False, norm: bool = True) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, inside), nn.Linear(inside, WIDTH)
        self.norm = nn.BatchNorm1d(inside) if norm else nn.Identity()
        if tied:
            self.last.weight = self.first.weight

    def forward(self, rows: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(rows))))


def cut(model: nn.Module) -> tuple[nn.Module, ...]:
    """Its layers."""
    batch = torch.ones(3, WIDTH), torch.zeros(3, WIDTH)
    task = Task(
        model=model,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: optim.SGD(parameters, lr=0.1),
        data=lambda _: batch,
    )
    return split(task).layers


def tensors(layers: tuple[nn.Module, ...]) -> set[int]:
    """Identities of all that they hold."""
    return {id(t) for layer in layers for t in (*layer.parameters(), *layer.buffers())}


def test_all_tensors_are_those_of_the_next_build() -> None:
    """Tied ones, too: none of the first build is left in either mode."""
    for tied in (False, True):
        before, after = Net(tied=tied), Net(tied=tied)
        layers = cut(before)
        assert rebound(layers, before, after)
        assert tensors(layers) == tensors((after,))


@pytest.mark.parametrize(
    "other",
    [
        lambda: Net(inside=5),
        lambda: Net(tied=True),
        lambda: Net(norm=False),
        lambda: Net().double(),
        lambda: Net().eval(),
        lambda: Net().requires_grad_(requires_grad=False),
    ],
    ids=["shapes", "ties", "modules", "types", "mode", "frozen"],
)
def test_another_model_changes_nothing(other: Callable[[], nn.Module]) -> None:
    """The answer is no, and the layers hold what they held."""
    before = Net()
    layers = cut(before)
    held = tensors(layers)
    assert not rebound(layers, before, other())
    assert tensors(layers) == held


def test_the_users_own_modules_are_not_rebound() -> None:
    """A row of layers is the model itself."""
    before, after = nn.Sequential(nn.Linear(WIDTH, WIDTH)), nn.Sequential(nn.Linear(WIDTH, WIDTH))
    assert not rebound(cut(before), before, after)
