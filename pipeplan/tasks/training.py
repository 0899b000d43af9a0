"""Losses and optimizers that several tasks share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from pipeplan.errors import InputError

Shape = TypeVar("Shape")
Optimizers = Callable[[Iterable[nn.Parameter]], Optimizer]


def next_token_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Mean cross entropy of all positions in nats: logits (rows, positions, vocabulary), ids."""
    return cross_entropy(logits.flatten(0, 1), target.flatten())


def adamw(rate: float) -> Optimizers:
    """AdamW as language models use it."""
    return lambda parameters: torch.optim.AdamW(parameters, lr=rate, betas=(0.9, 0.95))


def momentum(rate: float) -> Optimizers:
    """SGD with momentum as image classifiers use it."""
    return lambda parameters: torch.optim.SGD(parameters, lr=rate, momentum=0.9)


def preset(task: str, size: str | int, sizes: dict[str | int, Shape]) -> Shape:
    """The shape named `size`.

    Raises:
        InputError: if the task has none of that name.
    """
    if size not in sizes:
        known = ", ".join(map(str, sizes))
        raise InputError(f"task {task}: size: got {size!r}, need one of {known}")
    return sizes[size]
