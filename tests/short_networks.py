"""The library's networks with fewer blocks: a capture takes as long as there are layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from pipeplan import tasks
from pipeplan.task import Task
from pipeplan.tasks.densenet import DenseNet


def _of_blocks(make: Callable[..., Task]) -> Callable[..., Task]:
    """`make`, whose model is made of `blocks`, with the first ones of these."""

    @functools.wraps(make)
    def short(seed: int = 0, *, blocks: int = 2, **options: Any) -> Task:
        task = make(seed, **options)
        task.model.blocks = task.model.blocks[:blocks]
        return task

    return short


gpt2 = _of_blocks(tasks.gpt2)
"""Two layers for each block, and two more."""
mixer = _of_blocks(tasks.mixer)
llama = _of_blocks(tasks.llama)
vit = _of_blocks(tasks.vit)


def resnet(seed: int = 0, **options: Any) -> Task:
    """A ResNet with one block of each width: six layers."""
    task = tasks.resnet(seed, **options)
    task.model.body = nn.Sequential(*list(task.model.body)[::2])
    return task


def densenet(seed: int = 0, **options: Any) -> Task:
    """A DenseNet with two blocks of two layers, which read all before them."""
    return replace(tasks.densenet(seed, **options), model=DenseNet(8, (2, 2), 10))


def t5(seed: int = 0, **options: Any) -> Task:
    """A T5 with one block of its encoder and both of its decoder: eleven layers."""
    task = tasks.t5(seed, **options)
    task.model.encoder = task.model.encoder[:1]
    return task
