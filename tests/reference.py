"""One-process trainers, written as plainly as possible: what every pipelined run must equal.

They share the seed rule (`layer_seed`) with the runtime and nothing else.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeplan.runtime.seeds import layer_seed
from pipeplan.task import SplitModel, Task


@dataclass(frozen=True)
class Trained:
    """Losses of all micro-batches in order, and the final parameters by name."""

    losses: list[float]
    weights: dict[str, Tensor]


def train_flush(
    split: SplitModel, task: Task, steps: int, microbatches: int, seed: int
) -> Trained:
    """Ordinary training: accumulate the gradients of m micro-batches, divide by m, update."""
    layers = copy.deepcopy(torch.nn.ModuleList(split.layers))
    optimizer = task.optimizer(list(layers.parameters()))
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses += _accumulate(layers, task, step, microbatches, seed)
        _divide(layers, microbatches)
        optimizer.step()
    return Trained(losses, _named(split, layers))


def train_2bw(split: SplitModel, task: Task, steps: int, microbatches: int, seed: int) -> Trained:
    """W(t+1) = opt(W(t), grad f(W(t-1))) with W(-1) = W(0), as the formula reads."""
    layers = copy.deepcopy(torch.nn.ModuleList(split.layers))
    optimizer = task.optimizer(list(layers.parameters()))
    previous = _values(layers)
    losses = []
    for step in range(steps):
        newest = _values(layers)
        optimizer.zero_grad()
        _load(layers, previous)
        losses += _accumulate(layers, task, step, microbatches, seed)
        _load(layers, newest)
        _divide(layers, microbatches)
        optimizer.step()
        previous = newest
    return Trained(losses, _named(split, layers))


def _accumulate(
    layers: torch.nn.ModuleList, task: Task, step: int, microbatches: int, seed: int
) -> list[float]:
    losses = []
    for microbatch in range(step * microbatches, (step + 1) * microbatches):
        value, target = task.data(microbatch)
        boundary = (value,)
        for index, layer in enumerate(layers):
            torch.manual_seed(layer_seed(seed, index, microbatch))
            result = layer(*boundary)
            boundary = result if isinstance(result, tuple) else (result,)
        loss = task.loss(result, target)
        loss.backward()
        losses.append(loss.item())
    return losses


def _divide(layers: torch.nn.ModuleList, microbatches: int) -> None:
    for parameter in layers.parameters():
        if parameter.grad is not None:
            parameter.grad /= microbatches


def _values(layers: torch.nn.ModuleList) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in layers.parameters()]


def _load(layers: torch.nn.ModuleList, values: list[Tensor]) -> None:
    with torch.no_grad():
        for parameter, value in zip(layers.parameters(), values, strict=True):
            parameter.copy_(value)


def _named(split: SplitModel, layers: torch.nn.ModuleList) -> dict[str, Tensor]:
    return {
        names[local]: value.detach().clone()
        for names, layer in zip(split.fqns, layers, strict=True)
        for local, value in [*layer.named_parameters(), *layer.named_buffers()]
    }
