"""A loss is left as it was; one that remembers its calls, or draws elsewhere, is refused."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeplan.capture import agreement, estimate_task, profile_task, split
from pipeplan.devices import find_device
from pipeplan.errors import InputError
from pipeplan.task import Task
from tests.capture_tasks import sgd

Loss = Callable[[Any, Any], Tensor]


def rows(number: int) -> tuple[Tensor, Tensor]:
    """Other ones for each number."""
    return torch.full((4, 3), number + 1.0), torch.zeros(4, 3)


def task_of(loss: Loss) -> Task:
    """Two layers in a row."""
    layers = [nn.Linear(3, 3), nn.Linear(3, 3)]
    return Task(model=nn.Sequential(*layers), loss=loss, optimizer=sgd, data=rows)


class InBuffer(nn.Module):
    """Divides by a running mean."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = functional.mse_loss(output, target)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(loss, alpha=0.1)
        return loss / self.mean.clone()


class InTensor(nn.Module):
    """The same, in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self._mean = torch.ones(())

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        loss = functional.mse_loss(output, target)
        self._mean = 0.9 * self._mean + 0.1 * loss.detach()
        return loss / self._mean


class InCount:
    """No module; what it counts shows later than in the first calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return functional.mse_loss(output, target) * (2.0 if self.calls > 1000 else 1.0)

    def method(self, output: Tensor, target: Tensor) -> Tensor:
        """Counts as well."""
        return self(output, target)


class Logging(nn.Module):
    """Keeps the last value for a log, and a table that it makes once: no memory."""

    def __init__(self) -> None:
        super().__init__()
        self.last, self.weight = torch.zeros(()), None

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        if self.weight is None:
            self.weight = torch.ones(3)
        loss = ((output - target) * self.weight).pow(2).mean()
        self.last = loss.detach()
        return loss


def in_closure() -> Loss:
    """What nobody sees."""
    calls = [0]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls[0] += 1
        return functional.mse_loss(output, target) * calls[0]

    return loss


def drawing(output: Tensor, target: Tensor) -> Tensor:
    """Draws where nothing is set for a micro-batch."""
    return functional.mse_loss(output, target) * random.random()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (InBuffer, "loss InBuffer: changes its buffer 'mean' at every call"),
        (InTensor, "loss InTensor: changes its attribute '_mean' at every call"),
        (InCount, "loss InCount: changes its attribute 'calls' at every call"),
        (lambda: InCount().method, "loss InCount: changes its attribute 'calls'"),
        (in_closure, "loss loss: got another loss from a second call"),
        (lambda: drawing, "loss: draws from Python's or numpy's generator"),
    ],
)
def test_a_loss_that_remembers_is_refused(make: Callable[[], Loss], why: str) -> None:
    """Where the last layer is computed again, and in a resumed run, it would remember others."""
    task = task_of(make())
    with pytest.raises(InputError, match=why):
        agreement(split(task), task)


def kept(loss: Any) -> dict[str, Any]:
    """Attributes, and values of buffers."""
    buffers = {n: float(b) for n, b in loss.named_buffers()} if hasattr(loss, "buffers") else {}
    return {name: vars(loss)[name] for name in vars(loss) if name[:7] != "_buffer"} | buffers


@pytest.mark.parametrize("make", [InBuffer, InTensor, InCount, Logging])
def test_a_loss_is_left_as_it_was(make: Callable[[], Any]) -> None:
    """No fake tensor stays in it, and no call is counted."""
    loss = make()
    task, before = task_of(loss), kept(loss)
    split(task)
    assert kept(loss) == before
    estimate_task(task, find_device("h100"))
    assert kept(loss) == before


def test_a_value_for_a_log_is_no_memory() -> None:
    """The profile works, and puts it back."""
    loss = Logging()
    before = kept(loss)
    task = replace(task_of(loss), optimizer=sgd)
    assert profile_task(task, repeats=1, warmup=0).agreement is not None
    assert kept(loss) == before
