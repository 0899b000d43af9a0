"""What an architecture of the zoo is, and what several of them share: data, an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeplan.task import Task

Make = Callable[[], Task]
ROWS, WORDS, LENGTH, SIDE = 2, 64, 12, 32
"""Of the micro-batches: rows, words of the vocabulary, positions of a text, pixels of a side."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row of the table."""

    name: str
    make: Make
    """The task as its user would write it first."""
    setting: str = ""
    """What the documentation or the refusal says to change, where the first form is refused."""
    changed: Make | None = None
    """The task with that setting."""
    draws: bool = False
    """Whether it draws random numbers: then the loop beside it seeds as a run does."""
    reason: str = ""
    """Why its bits differ from the plain loop's, where that was found out."""


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Momentum and decay: a difference stays as large as it is."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def source(number: int) -> torch.Generator:
    """The generator of one micro-batch."""
    return torch.Generator().manual_seed(number)


def floats(number: int, *shape: int) -> Tensor:
    """Normal ones, (rows, ..)."""
    return torch.randn(ROWS, *shape, generator=source(number), device="cpu")


def classes(number: int, count: int, *shape: int) -> Tensor:
    """Integers below `count`, (rows, ..)."""
    return torch.randint(count, (ROWS, *shape), generator=source(number), device="cpu")


def mask(number: int, length: int = LENGTH) -> Tensor:
    """1 for words, 0 for padding behind them, (rows, length); no padding in the first one."""
    lengths = torch.randint(length // 2, length + 1, (ROWS, 1), generator=source(number))
    return (
        torch.arange(length) < (lengths if number else lengths.new_full((ROWS, 1), length))
    ).long()


def supervised(
    model: Callable[[], nn.Module | list[nn.Module]],
    loss: Callable[..., Tensor] | None,
    data: Callable[[int], object],
) -> Make:
    """The task of a model that is made anew at each call."""
    return lambda: Task(model=model(), loss=loss, optimizer=sgd, data=data)
