"""What a script gives `Pipeline` to train: a task, a model and its loss, or what makes one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from pipeplan.errors import InputError
from pipeplan.hosting import Draft
from pipeplan.plan import Plan
from pipeplan.repeat import from_here
from pipeplan.task import Task

_log = logging.getLogger(__name__)

Given = Task | nn.Module | Sequence[nn.Module]
"""What can be trained."""
Further = tuple[
    Callable[[Any, Any], Tensor] | None,
    Callable[[Iterable[nn.Parameter]], Optimizer] | None,
    Any,
]
"""Loss, optimizer and sample, which a model needs beside it."""


def drafted(
    plan: Plan, model: Given | Callable[[], Given], further: Further, options: Mapping[str, Any]
) -> Draft:
    """The task, without memory where a function makes it.

    Args:
        plan: what the ranks host.
        model: as `Pipeline` takes it.
        further: none of them with a task.
        options: further fields of `Task`.

    Raises:
        InputError: if `model` is something else, or what it needs beside it is missing or wrong.
    """
    if isinstance(model, Task | nn.Module | Sequence):
        task = _task(model, further, options)
        return Draft(lambda: task, plan, _log.warning, anew=False)
    if not callable(model):
        raise InputError(
            f"pipeline: got a {type(model).__name__}, need a task, a model, or a function that"
            " makes one"
        )
    return Draft(from_here(lambda: _task(model(), further, options)), plan, _log.warning)


def _task(model: Given, further: Further, options: Mapping[str, Any]) -> Task:
    loss, optimizer, sample = further
    if isinstance(model, Task):
        if options or any(each is not None for each in further):
            raise InputError(
                "pipeline: got a task and further arguments, need one or the other:"
                " the task says loss, optimizer and the rest"
            )
        return model
    if optimizer is None or sample is None:
        raise InputError(
            "pipeline: got a model alone, need optimizer and sample with it, and a loss where it"
            " does not compute its own"
        )
    try:
        return Task(model=model, loss=loss, optimizer=optimizer, data=lambda _: sample, **options)
    except TypeError as error:
        raise InputError(f"pipeline: {error}, need fields of Task") from None
