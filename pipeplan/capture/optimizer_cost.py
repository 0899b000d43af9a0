"""What the user's optimizer keeps, needs and takes for one layer's parameters."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_iter

from pipeplan.capture.place import Clock
from pipeplan.capture.roofline import Roofline
from pipeplan.devices import Device
from pipeplan.errors import InputError
from pipeplan.livebytes import LiveBytes, storage_bytes

Work = Callable[[], None]
Timer = Callable[[Work], int]
"""Runs the work, as often as it likes, and says how many nanoseconds it takes once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerCost:
    """Of one step on one layer's parameters."""

    step_ns: int = 0
    """Update and zeroing of the gradients."""
    state_bytes: int = 0
    """All tensors of the optimizer's state, step counters included."""
    workspace_bytes: int = 0
    """Most bytes alive at once during the step, beyond parameters, gradients and state."""


def median_of(repeats: int, clock: Clock) -> Timer:
    """A timer that measures `repeats` times and takes the median."""

    def time(work: Work) -> int:
        marks: list[tuple[Any, Any]] = []
        for _ in range(repeats):
            begin = clock.mark()
            work()
            marks.append((begin, clock.mark()))
        lengths: list[int] = [clock.between(begin, end) for begin, end in marks]
        return statistics.median_low(lengths)

    return time


def roofline_of(device: Device) -> Timer:
    """A timer that estimates."""

    def time(work: Work) -> int:
        roofline = Roofline(device)
        with roofline:
            work()
        return round(roofline.ns)

    return time


def cost(
    make: Callable[[Iterable[nn.Parameter]], Optimizer],
    parameters: Sequence[nn.Parameter],
    timer: Timer,
) -> OptimizerCost:
    """Steps an optimizer of `parameters`; the parameters keep their values.

    The first step, which makes the state, does not count. With fake parameters all of this is
    fake, too, but for the step counters, which torch keeps apart and looks at.

    Args:
        make: the task's optimizer.
        parameters: trainable ones, with gradient buffers.
        timer: of one step.

    Raises:
        InputError: if the optimizer cannot be made for them, or its step fails.
    """
    if not parameters:
        return OptimizerCost()
    values = [parameter.detach().clone() for parameter in parameters]
    try:
        optimizer = make(list(parameters))
        optimizer.step()
        found = _measure(optimizer, parameters, timer)
    except Exception as error:
        raise InputError(
            f"task: optimizer: failed on one layer's parameters: {type(error).__name__}: {error}."
            " It must work on any part of the model, with step() without arguments."
        ) from error
    with torch.no_grad():
        for parameter, value in zip(parameters, values, strict=True):
            parameter.copy_(value)
    return found


def _measure(
    optimizer: Optimizer, parameters: Sequence[nn.Parameter], timer: Timer
) -> OptimizerCost:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    entries = list(optimizer.state.values())
    state = [value for value in tree_iter(entries) if isinstance(value, Tensor)]
    known = [*parameters, *gradients]
    live = LiveBytes([*known, *state])
    before = live.live
    with live:
        optimizer.step()

    def step() -> None:
        optimizer.step()
        for gradient in gradients:
            gradient.zero_()

    return OptimizerCost(
        step_ns=timer(step),
        state_bytes=storage_bytes([*known, *state]) - storage_bytes(known),
        workspace_bytes=live.peak - before,
    )
