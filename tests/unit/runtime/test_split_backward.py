"""Stages whose backward is I and W train as one process does and hold what (S3) to (S6) say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor, nn

from pipeplan import lowering
from pipeplan.capture import profile_task, split
from pipeplan.chain import Chain
from pipeplan.errors import RankError
from pipeplan.plan import Plan, Remat, Stage
from pipeplan.program import ActionKind
from pipeplan.runtime.dry_run.run import dry_run
from pipeplan.runtime.parameters.tied_parameters import untie
from pipeplan.simulator import simulate
from pipeplan.task import SplitModel, Task
from pipeplan.testing import plans, plans_split, reference
from pipeplan.verifier import Rule, verify
from tests import capture_tasks, grids, models, pipelines
from tests.unit.runtime import test_memory

Map = tuple[Sequence[int], Sequence[int], int]
MAPS: dict[str, Map] = {
    "one rank, k = 1": ([3, 5], [0, 0, 0], 1),
    "looped on two ranks, k = 2": ([2, 4, 6], [0, 1, 0, 1], 2),
    "four ranks, k = 1": ([2, 4, 6], [0, 1, 2, 3], 1),
    "four ranks, there and back, k = 2": ([1, 3, 4, 5, 7], [0, 1, 2, 3, 1, 0], 2),
}


def check_exact(plan: Plan, split: SplitModel, task: Task) -> None:
    """Losses, weights and buffers after three steps equal one process, to the bit."""
    expected = reference.train("flush", split, task, 3, 6, seed=3)
    pattern = pipelines.pattern_of(plan, period=3)
    kinds = {action.kind for rank in pattern.ranks for action in rank}
    assert {ActionKind.I, ActionKind.W} <= kinds
    outcome = pipelines.train(plan, pattern, untie(split, task.tied), task, 3)
    assert outcome.losses == expected.losses
    assert outcome.weights.keys() == expected.weights.keys()
    for name, value in outcome.weights.items():
        assert torch.equal(value, expected.weights[name]), name


@grids.each_pair(family=list(models.FAMILIES), shape=MAPS)
def test_family_trains_exactly(family: str, shape: Map) -> None:
    """Six families, with dropout, tied weights and clipping."""
    cuts, gpus, k = shape
    split, task = models.make(family)
    plan = pipelines.plan_of(cuts, gpus, "flush", 6, k=k)
    check_exact(pipelines.split_backwards(plan), split, task)


@grids.each_pair(optimizer=["sgd", "adamw"], shape=MAPS, stages=[None, [1]])
def test_toy_trains_exactly(optimizer: str, shape: Map, stages: Sequence[int] | None) -> None:
    """Boundaries of several tensors, in-place layers; all stages split, or one of them."""
    cuts, gpus, k = shape
    plan = pipelines.split_backwards(pipelines.plan_of(cuts, gpus, "flush", 6, k=k), stages)
    check_exact(plan, *pipelines.toy(optimizer))


@pytest.mark.parametrize("family", ["GPT-2", "ResNet"])
def test_computed_again_exactly(family: str) -> None:
    """Runs that are computed again in I, with layers around them that are not."""
    split, task = models.make(family)
    plan = pipelines.split_backwards(pipelines.plan_of([2, 5], [0, 1, 0], "flush", 6))
    runs = {1: ((3, 4),), 2: ((5, 5), (6, 7))}
    again = tuple(
        stage.model_copy(update={"remat": Remat(recompute=runs[stage.id])})
        if stage.id in runs
        else stage
        for stage in plan.stages
    )
    check_exact(plan.model_copy(update={"stages": again}), split, task)


@pytest.mark.parametrize("accumulate", [None, torch.float32])
def test_autocast_trains_exactly(accumulate: torch.dtype | None) -> None:
    """Casts of weights are shared as they are without the split; sums may be wider."""
    split, task = models.make("ViT")
    task = replace(task, autocast=torch.bfloat16, accumulate=accumulate)
    split = replace(split, autocast=torch.bfloat16, accumulate=accumulate)
    plan = pipelines.split_backwards(pipelines.plan_of([3, 5], [0, 1, 0], "flush", 6))
    check_exact(plan, split, task)


def profiled(name: str) -> Chain:
    """With times that make every op last, both halves of a backward among them."""
    chain = test_memory.profiled(name)
    layers = tuple(
        layer
        if layer.backward_weight_ns is None
        else layer.model_copy(update={"backward_weight_ns": 2 + index % 3})
        for index, layer in enumerate(chain.layers)
    )
    return chain.model_copy(update={"layers": layers})


def planned(name: str, shape: tuple[int, int, int], *, again: bool = False) -> Plan:
    """A valid plan in which all stages but the first are split."""
    gpus, k, seed = shape
    plain = test_memory.planned(profiled(name), gpus, "flush", k, seed)
    stages = pipelines.split_backwards(plain).stages
    if again:
        stages = tuple(plans.recomputing(Random(seed), stage) for stage in stages)
    assert any(stage.split_backward for stage in stages)
    plan = test_memory.planned(profiled(name), gpus, "flush", k, seed, stages)
    assert not [found for found in verify(plan) if found.rule is not Rule.DIGESTS]
    return plan


@grids.each_pair(name=test_memory.ROWS, shape=test_memory.SHAPES)
def test_peak_is_as_planned(name: str, shape: tuple[int, int, int]) -> None:
    """Every rank's measured peak equals `peak_bytes`, to the byte."""
    plan = planned(name, shape)
    peaks = [row.peak_bytes for row in plan.memory]
    assert test_memory.measured(plan, test_memory.TASKS[name]()) == peaks
