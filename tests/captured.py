"""Models that are captured once for many tests: a capture takes seconds, a copy milliseconds."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch

from pipeplan.capture import split
from pipeplan.capture.measurement.task_profile import measure_layers
from pipeplan.chain import Chain
from pipeplan.layer import Layer
from pipeplan.split_model import SplitModel
from pipeplan.task import Task
from pipeplan.testing.plans import NO_OTHER_TIMES

Make = Callable[..., Task]


def captured(make: Make, *words: Any) -> tuple[SplitModel, Task]:
    """What `split(make(*words))` gives, with initial weights that are always the same; the task.

    The layers are copies that nobody else has. They are for training alone.
    """
    model, task = _once(make, *words)
    return copy.deepcopy(model), task


@functools.cache
def chain_of(make: Make, *words: Any) -> Chain:
    """Its chain, with measured bytes; times are of one micro-batch."""
    return measured_chain(*captured(make, *words))


def measured_chain(model: SplitModel, task: Task) -> Chain:
    """The chain of layers that are there already, for a task that may differ from theirs."""
    found = measure_layers(model, task, repeats=1, warmup=0, say=lambda _: None)
    return Chain(
        name="captured", input_bytes=found.input_bytes, tied=task.tied, layers=found.layers
    )


def lasting(chain: Chain, unit_ns: int = 1, *, halves: bool = False) -> Chain:
    """The chain with times that make every op last and are equal wherever it was measured.

    `halves` tells times of the gradients of weights too, where a layer has them.
    """
    layers = tuple(
        layer.model_copy(
            update={
                **NO_OTHER_TIMES,
                "forward_ns": unit_ns * (3 + i % 3),
                "backward_ns": unit_ns * (7 - i % 2),
                "optimizer_ns": unit_ns if layer.weight_bytes else 0,
                "backward_weight_ns": unit_ns * (2 + i % 3) if halves and _halves(layer) else None,
            }
        )
        for i, layer in enumerate(chain.layers)
    )
    return chain.model_copy(update={"layers": layers})


def _halves(layer: Layer) -> bool:
    """Whether its backward has two."""
    return layer.backward_weight_ns is not None


@functools.cache
def _once(make: Make, *words: Any) -> tuple[SplitModel, Task]:
    torch.manual_seed(0)
    task = make(*words)
    return split(task, evaluates=False), task
