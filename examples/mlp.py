"""The smallest useful task: a multilayer perceptron learns a fixed random function.

Name it as `examples/mlp.py:task`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pipeplan.task import Task, task_function

ROWS, FEATURES, HIDDEN = 64, 32, 256


@task_function
def task(seed: int = 0) -> Task:
    """Four linear layers with ReLU and dropout, trained with SGD and momentum."""
    teacher = torch.randn(FEATURES, 1, generator=torch.Generator().manual_seed(seed))

    def data(microbatch: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + microbatch)
        source = torch.randn(ROWS, FEATURES, generator=generator)
        return source, torch.tanh(source @ teacher)

    return Task(
        model=nn.Sequential(
            nn.Linear(FEATURES, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(HIDDEN, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, 1),
        ),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        data=data,
    )
