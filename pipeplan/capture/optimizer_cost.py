"""What the user's optimizer keeps, needs and takes for one layer's parameters."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_iter

from pipeplan.errors import InputError
from pipeplan.livebytes import LiveBytes, storage_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCost:
    """Of one step on one layer's parameters."""

    step_ns: int = 0
    """Update and zeroing of the gradients, median."""
    state_bytes: int = 0
    """All tensors of the optimizer's state, step counters included."""
    workspace_bytes: int = 0
    """Most bytes alive at once during the step, beyond parameters, gradients and state."""


def measure(
    make: Callable[[Iterable[nn.Parameter]], Optimizer],
    parameters: Sequence[nn.Parameter],
    repeats: int,
) -> OptimizerCost:
    """Steps an optimizer of `parameters` `repeats` times; the parameters keep their values.

    The first step, which makes the state, is not measured.

    Args:
        make: the task's optimizer.
        parameters: trainable ones, with gradient buffers.
        repeats: timed steps.

    Raises:
        InputError: if the optimizer cannot be made for them, or its step fails.
    """
    if not parameters:
        return OptimizerCost()
    values = [parameter.detach().clone() for parameter in parameters]
    try:
        optimizer = make(list(parameters))
        optimizer.step()
        cost = _measure(optimizer, parameters, repeats)
    except Exception as error:
        raise InputError(
            f"task: optimizer: failed on one layer's parameters: {type(error).__name__}: {error}."
            " It must work on any part of the model, with step() without arguments."
        ) from error
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
    return cost


def _measure(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], repeats: int
) -> OptimizerCost:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    entries = list(optimizer.state.values())
    state = [value for value in tree_iter(entries) if isinstance(value, Tensor)]
    known = [*parameters, *gradients]
    live = LiveBytes([*known, *state])
    before = live.live
    with live:
        optimizer.step()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter_ns()
        optimizer.step()
        for gradient in gradients:
            gradient.zero_()
        times.append(time.perf_counter_ns() - begin)
    return OptimizerCost(
        step_ns=round(statistics.median(times)),
        state_bytes=storage_bytes([*known, *state]) - storage_bytes(known),
        workspace_bytes=live.peak - before,
    )
