"""Models that go wrong in silence somewhere train as a plain loop does, or are refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipeplan.capture import agreement, split
from pipeplan.capture.eager_modules.eager_operation import seed_like_torch
from pipeplan.errors import InputError
from pipeplan.runtime.parameters.tied_parameters import untie
from pipeplan.runtime.stages.random_state import layer_seed
from pipeplan.split_model import SplitModel
from pipeplan.task import Task
from tests import grids, odd_models, pipelines

STEPS, M, SEED = 3, 4, 3
Build = Callable[[], nn.Module | list[nn.Module]]


def task_of(build: Build) -> Task:
    """A task around a model that is always made with the same weights."""
    torch.manual_seed(1)
    return Task(
        model=build(),
        loss=cross_entropy,
        optimizer=pipelines.OPTIMIZERS["sgd"],
        data=pipelines.data,
        tied="synchronize",
    )


def plain_loop(build: Build) -> dict[str, Tensor]:
    """What the user's own loop makes of parameters and buffers; it knows of no layers."""
    task = task_of(build)
    model = task.model if isinstance(task.model, nn.Module) else nn.Sequential(*task.model)
    optimizer = task.optimizer(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(step * M, (step + 1) * M):
            source, target = task.microbatch(number)
            task.loss(model(source), target).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= M
        optimizer.step()
    named = dict([*model.named_parameters(), *model.named_buffers()])
    return {name.replace("_orig_mod.", ""): value for name, value in named.items()}


def seeded_loop(build: Build) -> dict[str, Tensor]:
    """The same over the layers, before each of which all generators are set."""
    task = task_of(build)
    model = split(task)
    named = {
        names[local]: value
        for names, layer in zip(model.fqns, model.layers, strict=True)
        for local, value in [*layer.named_parameters(), *layer.named_buffers()]
    }
    parameters = [value for value in named.values() if isinstance(value, nn.Parameter)]
    optimizer = task.optimizer(parameters)
    for step in range(STEPS):
        optimizer.zero_grad()
        for number in range(step * M, (step + 1) * M):
            value, target = task.microbatch(number)
            for index, layer in enumerate(model.layers):
                torch.manual_seed(layer_seed(SEED, index, number))
                seed_like_torch()
                value = layer(value)
            task.loss(value, target).backward()
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad /= M
        optimizer.step()
    return named


def pipelined(build: Build, ranks: int) -> dict[str, Tensor]:
    """The same by a pipeline of one or two ranks; the layers have been compared before."""
    task = task_of(build)
    model: SplitModel = split(task)
    layers = len(model.layers)
    assert agreement(model, task).is_exact
    model = untie(model, task.tied)
    cuts = [layers // 2] if ranks == 2 else []
    plan = pipelines.plan_of(cuts, list(range(ranks)), "flush", M, layers=layers)
    pattern = pipelines.pattern_of(plan, period=2)
    weights = pipelines.train(plan, pattern, model, task, STEPS, seed=SEED).weights
    return {name.replace("_orig_mod.", ""): value for name, value in weights.items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Same names, same bits."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@grids.each_value(build=odd_models.EXACT, ranks=[2, 1])
def test_trains_as_a_plain_loop_does(build: Build, ranks: int) -> None:
    """Weights and buffers after three steps are bit-equal."""
    expected = plain_loop(build)
    assert_equal(pipelined(build, ranks), expected)


@grids.each_value(build=odd_models.DRAWN, ranks=[1, 2])
def test_draws_are_those_of_the_seed(build: Build, ranks: int) -> None:
    """Python's and numpy's numbers depend on layer and micro-batch, not on who runs when."""
    expected = seeded_loop(build)
    assert_equal(pipelined(build, ranks), expected)


@pytest.mark.parametrize(("build", "message"), odd_models.REFUSED.values(), ids=odd_models.REFUSED)
def test_refuses(build: Build, message: str) -> None:
    """One message, which names what is wrong."""
    task = task_of(build)
    with pytest.raises(InputError, match=message):
        agreement(split(task), task)
