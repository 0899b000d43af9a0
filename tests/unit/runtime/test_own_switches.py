"""Modules whose eval mode is more than a flag: a stage switches them, and keeps its weights."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from pipeplan import Pipeline
from pipeplan.capture import profile_task
from pipeplan.task import Task
from tests import launch_task, pipelines
from tests.unit.capture.test_graph import Merging, Scaling

ROWS = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))


def task_of(kind: Callable[[], nn.Module]) -> Task:
    """A module of `kind` before a linear layer."""
    torch.manual_seed(0)
    return Task(
        model=nn.Sequential(kind(), nn.Tanh(), nn.Linear(4, 4)),
        loss=nn.functional.mse_loss,
        optimizer=pipelines.OPTIMIZERS["sgd"],
        data=lambda _: (ROWS, ROWS),
    )


@pytest.mark.parametrize("kind", [Merging, Scaling])
def test_evaluates_as_the_model_does(kind: Callable[[], nn.Module]) -> None:
    """The loss is that of `model.eval()`; behind it training goes on as if there had been none."""
    task, alone = task_of(kind), task_of(kind)
    chain = launch_task.leveled(profile_task(task, repeats=1, warmup=0))
    plan = launch_task.plan_of(chain, 1, "flush")
    with Pipeline(alone, plan, seed=3) as pipeline:
        pipeline.run(2)
    with Pipeline(task, plan, seed=3) as pipeline:
        pipeline.run(1)
        found = pipeline.evaluate(numbers=[0])
        assert isinstance(task.model, nn.Module)
        model = copy.deepcopy(task.model).eval()
        assert all(module.training for module in task.model.modules())
        pipeline.run(1)
    with torch.no_grad():
        assert found == pytest.approx(float(nn.functional.mse_loss(model(ROWS), ROWS)))
    assert isinstance(alone.model, nn.Module)
    for mine, other in zip(task.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_weights_are_the_same_tensors() -> None:
    """A merge is undone in the memory where the weights lie."""
    task = task_of(Merging)
    chain = launch_task.leveled(profile_task(task, repeats=1, warmup=0))
    assert isinstance(task.model, nn.Module)
    with Pipeline(task, launch_task.plan_of(chain, 1, "flush"), seed=3) as pipeline:
        before: dict[str, Tensor] = copy.deepcopy(task.model.state_dict())
        pipeline.evaluate(numbers=[0])
        for name, value in task.model.state_dict().items():
            assert torch.equal(value, before[name])
