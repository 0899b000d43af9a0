"""The library's networks with fewer blocks: a capture takes as long as there are layers."""

from __future__ import annotations

from typing import Any

from torch import nn

from pipeplan import tasks
from pipeplan.task import Task


def gpt2(seed: int = 0, *, blocks: int = 2, **options: Any) -> Task:
    """A GPT-2 of two layers for each of its blocks, and two more."""
    task = tasks.gpt2(seed, **options)
    task.model.blocks = task.model.blocks[:blocks]
    return task


def mixer(seed: int = 0, *, blocks: int = 2, **options: Any) -> Task:
    """An MLP-mixer of so many blocks."""
    task = tasks.mixer(seed, **options)
    task.model.blocks = task.model.blocks[:blocks]
    return task


def llama(seed: int = 0, *, blocks: int = 2, **options: Any) -> Task:
    """A Llama of so many blocks."""
    task = tasks.llama(seed, **options)
    task.model.blocks = task.model.blocks[:blocks]
    return task


def vit(seed: int = 0, *, blocks: int = 2, **options: Any) -> Task:
    """A vision transformer of so many blocks."""
    task = tasks.vit(seed, **options)
    task.model.blocks = task.model.blocks[:blocks]
    return task


def resnet(seed: int = 0, **options: Any) -> Task:
    """A ResNet with one block of each width: six layers."""
    task = tasks.resnet(seed, **options)
    task.model.body = nn.Sequential(*list(task.model.body)[::2])
    return task


def t5(seed: int = 0, **options: Any) -> Task:
    """A T5 with one block of its encoder and both of its decoder: eleven layers."""
    task = tasks.t5(seed, **options)
    task.model.encoder = task.model.encoder[:1]
    return task
