"""The launch task on the batches of a `DataLoader` with two workers, and the loader itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from pipeplan.batching import batches
from pipeplan.task import Task, task_function
from tests import launch_task

REFERENCE = "tests.loader_task:task"


class Rows(Dataset[Any]):
    """37 samples, made where they are loaded: seven micro-batches of five and a rest."""

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator), index % 3


def loader(workers: int, starts: str | None = None) -> DataLoader[Any]:
    """As a user has it."""
    return DataLoader(
        Rows(), batch_size=5, drop_last=True, num_workers=workers, multiprocessing_context=starts
    )


@task_function
def task(seed: int) -> Task:
    """On what workers load ahead."""
    return replace(launch_task.task(seed), data=batches(loader(2)))


def plain(seed: int, count: int) -> Task:
    """On the first `count` batches of epochs over the loader, without workers and numbers."""
    found: list[Any] = []
    while len(found) < count:
        found += islice(loader(0), count - len(found))
    return replace(launch_task.task(seed), data=lambda number: found[number])
