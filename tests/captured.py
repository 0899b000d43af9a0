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
from pipeplan.split_model import SplitModel
from pipeplan.task import Task

Make = Callable[..., Task]


def captured(make: Make, *words: Any) -> tuple[SplitModel, Task]:
    """What `split(make(*words))` gives, with initial weights that are always the same; the task.

    The layers are copies that nobody else has. They are for training alone.
    """
    model, task = _once(make, *words)
    return copy.deepcopy(model), task


def chain_of(make: Make, *words: Any) -> Chain:
    """Its chain, with measured bytes; times are of one micro-batch."""
    model, task = captured(make, *words)
    found = measure_layers(model, task, repeats=1, warmup=0, say=lambda _: None)
    return Chain(
        name="captured", input_bytes=found.input_bytes, tied=task.tied, layers=found.layers
    )


@functools.cache
def _once(make: Make, *words: Any) -> tuple[SplitModel, Task]:
    torch.manual_seed(0)
    task = make(*words)
    return split(task, evaluates=False), task
