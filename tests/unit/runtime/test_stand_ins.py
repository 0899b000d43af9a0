"""Optimizers that step copies are made as if of the parameters that the user knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn, optim

from pipeplan.capture import profile_task
from pipeplan.errors import InputError
from pipeplan.plan import Plan
from pipeplan.runtime.parameters.tied_parameters import untie
from pipeplan.split_model import SplitModel
from pipeplan.task import Task
from pipeplan.testing import reference
from tests import pipelines
from tests.unit.runtime.test_host_states import away
from tests.unit.runtime.test_updates import MAPS, STEPS, M, check, same
from tests.unit.runtime.test_wide import narrow

Made = tuple[Plan, SplitModel, Task]


def copies() -> Made:
    """Copies of shared parameters on two ranks."""
    split, task = pipelines.tied(clip=False, how="synchronize")
    return pipelines.plan_of([2], [0, 1], "flush", M, layers=5), split, task


def masters() -> Made:
    """Copies in 32 bits."""
    return pipelines.plan_of([4], [0, 1], "2bw", M), *narrow("both")


def hosted() -> Made:
    """Copies on the host."""
    return away(pipelines.plan_of([4], [0, 1], "flush", M), [0, 1]), *pipelines.toy()


@pytest.mark.parametrize("make", [copies, masters, hosted])
def test_users_know_parameters_by_identity(make: Callable[[], Made]) -> None:
    """Rates out of a dictionary by parameter: what has rate 0 stays, everything else moves."""
    plan, split, task = make()
    known = [parameter for layer in split.layers for parameter in layer.parameters()]
    rates = {parameter: 0.0 if parameter is known[0] else 0.05 for parameter in known}

    def optimizer(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        return optim.SGD([{"params": [each], "lr": rates[each]} for each in parameters])

    split = untie(split, task.tied)
    before = [[each.detach().clone() for each in layer.parameters()] for layer in split.layers]
    task = replace(task, optimizer=optimizer)
    outcome = pipelines.train(plan, pipelines.pattern_of(plan, 3), split, task, 2)
    assert outcome.rates == [(0.05, 0.0)] * 2
    still = next(iter(split.fqns[0].values()))
    for layer, values, fqns in zip(split.layers, before, split.fqns, strict=True):
        for (local, parameter), value in zip(layer.named_parameters(), values, strict=True):
            assert torch.equal(parameter, value) == (fqns[local] == still), fqns[local]


def test_state_that_is_made_at_once_is_that_of_the_copies() -> None:
    """Adagrad fills its sums when it is made: in 32 bits for copies in 32 bits."""
    split, task = narrow("masters")
    task = replace(task, optimizer=lambda p: optim.Adagrad(p, initial_accumulator_value=0.1))
    check(MAPS["looped"], "flush", split, task)


class Listing(optim.SGD):
    """Steps a list of its own."""

    def __init__(self, parameters: Iterable[nn.Parameter], **options: Any) -> None:
        self.mine = list(parameters)
        super().__init__(self.mine, **options)


def test_optimizers_that_cannot_be_given_copies_are_refused() -> None:
    """They would step what nobody reads; where nothing stands in for parameters they may."""
    split, task = narrow("masters")
    plan = pipelines.plan_of([4], [0, 1], "flush", M)
    task = replace(task, optimizer=lambda p: Listing(p, lr=0.05))
    with pytest.raises(InputError, match=r"optimizer: Listing keeps.*outside of param_groups"):
        pipelines.train(plan, pipelines.pattern_of(plan, 3), split, task, 1)
    split, own = pipelines.toy()
    check(MAPS["looped"], "flush", split, replace(own, optimizer=task.optimizer))


def test_an_optimizer_of_more_than_it_is_given_is_refused() -> None:
    """One of the whole model would be stepped once per layer, with a state each time."""
    split, task = pipelines.toy()
    every = [parameter for layer in split.layers for parameter in layer.parameters()]
    whole = replace(task, optimizer=lambda _: optim.SGD(every, lr=0.1))
    refused = r"got SGD whose param_groups\[0\] holds a parameter of shape .* was not given"
    with pytest.raises(InputError, match="^task: optimizer: " + refused):
        profile_task(replace(whole, model=split.layers), repeats=1, warmup=0)
    with pytest.raises(InputError, match=refused):
        check(MAPS["one rank"], "flush", split, whole)


def test_profiles_give_users_their_parameters() -> None:
    """The optimizer's time and bytes are measured of what a run makes."""
    layers = [nn.Linear(6, 6).bfloat16(), nn.Linear(6, 1).bfloat16()]
    known = {parameter for layer in layers for parameter in layer.parameters()}

    def optimizer(parameters: Iterable[nn.Parameter]) -> optim.Optimizer:
        given = list(parameters)
        assert known.issuperset(given)
        return optim.AdamW(given)

    batch = torch.ones(2, 6).bfloat16(), torch.ones(2, 1).bfloat16()
    task = Task(
        model=layers,
        loss=nn.functional.mse_loss,
        optimizer=optimizer,
        data=lambda _: batch,
        master_weights=True,
    )
    chain = profile_task(task, repeats=1, warmup=0)
    assert chain.layers[0].optimizer_bytes >= 3 * 42 * 4


def test_schedules_of_a_rate_that_is_one_tensor() -> None:
    """Each layer's optimizer has a rate of its own, so it is scheduled once per update."""

    def rated() -> tuple[SplitModel, Task]:
        split, task = pipelines.toy()
        rate = torch.tensor(0.05)
        return split, replace(
            task,
            optimizer=lambda p: optim.SGD(p, lr=rate),
            scheduler=lambda o: optim.lr_scheduler.ExponentialLR(o, 0.5),
        )

    expected = reference.train("flush", *rated(), STEPS, M, seed=3)
    plan = pipelines.plan_of(*MAPS["looped"], "flush", M)
    same(pipelines.train(plan, pipelines.pattern_of(plan, 3), *rated(), STEPS), expected)
