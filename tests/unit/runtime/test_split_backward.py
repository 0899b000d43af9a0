"""Stages whose backward is I and W train as one process does and hold what (S3) to (S6) say."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeplan import lowering
from pipeplan.capture import split
from pipeplan.chain import Chain
from pipeplan.errors import RankError
from pipeplan.plan import OpKind, Plan, Remat
from pipeplan.program import ActionKind
from pipeplan.runtime.parameters.tied_parameters import untie
from pipeplan.split_model import SplitModel
from pipeplan.task import Task, Tied
from pipeplan.testing import plans, plans_offload, plans_split, reference
from pipeplan.testing.in_process import run_ranks
from pipeplan.verifier import Rule, verify
from tests import dry_runs, grids, models, pipelines
from tests.captured import lasting, measured_chain
from tests.unit.runtime import test_autocast, test_drop, test_hooks, test_memory

STEPS, M = 3, 4
SUM_BYTES = 8
"""A number of 64 bits, while outputs are compared with those of the first forward."""
Map = tuple[Sequence[int], Sequence[int], int]
MAPS: dict[str, Map] = {
    "one rank, k = 1": ([3, 5], [0, 0, 0], 1),
    "looped on two ranks, k = 2": ([2, 4, 6], [0, 1, 0, 1], 2),
    "four ranks, k = 1": ([2, 4, 6], [0, 1, 2, 3], 1),
    "four ranks, there and back, k = 2": ([1, 3, 4, 5, 7], [0, 1, 2, 3, 1, 0], 2),
}


def check_exact(plan: Plan, split: SplitModel, task: Task) -> None:
    """Losses, weights and buffers after three steps equal one process, to the bit."""
    expected = reference.train("flush", split, task, STEPS, M, seed=3)
    pattern = pipelines.pattern_of(plan, period=3)
    kinds = {action.kind for rank in pattern.ranks for action in rank}
    assert {ActionKind.I, ActionKind.W} <= kinds
    outcome = pipelines.train(plan, pattern, untie(split, task.tied), task, STEPS)
    assert outcome.losses == expected.losses
    assert outcome.weights.keys() == expected.weights.keys()
    for name, value in outcome.weights.items():
        assert torch.equal(value, expected.weights[name]), name


@grids.each_value(family=list(models.FAMILIES), shape=MAPS)
def test_family_trains_exactly(family: str, shape: Map) -> None:
    """Six families, with dropout, tied weights and clipping."""
    cuts, gpus, k = shape
    split, task = models.make(family)
    plan = pipelines.plan_of(cuts, gpus, "flush", M, k=k)
    check_exact(pipelines.split_backwards(plan), split, task)


@grids.each_pair(optimizer=["sgd", "adamw"], shape=MAPS, stages=[None, [1]])
def test_toy_trains_exactly(optimizer: str, shape: Map, stages: Sequence[int] | None) -> None:
    """Boundaries of several tensors, in-place layers; all stages split, or one of them."""
    cuts, gpus, k = shape
    plan = pipelines.split_backwards(pipelines.plan_of(cuts, gpus, "flush", M, k=k), stages)
    check_exact(plan, *pipelines.toy(optimizer))


@pytest.mark.parametrize("family", ["GPT-2", "ResNet"])
def test_computed_again_exactly(family: str) -> None:
    """Runs that are computed again in I, with layers around them that are not."""
    split, task = models.make(family)
    plan = pipelines.split_backwards(pipelines.plan_of([2, 5], [0, 1, 0], "flush", M))
    runs = {1: ((3, 4),), 2: ((5, 5), (6, 7))}
    again = tuple(
        stage.model_copy(update={"remat": Remat(recompute=runs[stage.id])})
        if stage.id in runs
        else stage
        for stage in plan.stages
    )
    check_exact(plan.model_copy(update={"stages": again}), split, task)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_trains_exactly(dtype: torch.dtype) -> None:
    """A weight is used twice behind one cast; in float16 the loss is scaled."""
    task = test_autocast.task(dtype)
    plan = pipelines.split_backwards(pipelines.plan_of([1, 4, 6], [0, 1, 0, 1], "flush", M))
    check_exact(plan, split(task), task)


@pytest.mark.parametrize("kind", test_hooks.HOOKS)
def test_hooks_run_once_per_microbatch(kind: str) -> None:
    """Hooks on parameters, on gradients and on their sums, train as in a loop."""
    plan = pipelines.split_backwards(pipelines.plan_of([2, 4], [0, 1, 0], "flush", M))
    check_exact(plan, *test_hooks.toy(test_hooks.HOOKS[kind]))


@pytest.mark.parametrize(("how", "cuts"), [("synchronize", [1, 3]), ("colocate", [1, 2])])
def test_tied_weights_train_exactly(how: Tied, cuts: list[int]) -> None:
    """Layers on several ranks, or several stages of one, share weights; with clipping."""
    model, task = pipelines.tied(clip=True, how=how)
    gpus = [0, 1, 0] if how == "synchronize" else [0, 0, 0]
    plan = pipelines.split_backwards(pipelines.plan_of(cuts, gpus, "flush", M, layers=5))
    check_exact(plan, model, task)


@pytest.mark.parametrize("make", [test_drop.plain, test_drop.clipped])
def test_what_is_left_of_a_dropped_step(make: Callable[[], tuple[SplitModel, Task]]) -> None:
    """The last finished step, wherever the ranks are when they drop the next one."""
    _, task = make()
    plan = pipelines.plan_of([2, 4, 6], [0, 1, 0, 1], "flush", test_drop.M)
    plan = pipelines.split_backwards(plan)
    after = functools.cache(lambda steps: test_drop.run(plan, make()[0], task, steps))
    lost = 0
    for part in (0.15, 0.4, 0.55, 0.6, 0.9):
        question = int(part * after(test_drop.STEPS).questions[1])
        ended = test_drop.run(plan, make()[0], task, test_drop.STEPS, 1, question)
        test_drop.same(ended, after(ended.done))
        lost += ended.lost
    assert lost, "no step was dropped: the test shows nothing"


class _Breaks(nn.Module):
    """Its weight's hook fails at the third micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.calls = 0
        self.inner.weight.register_hook(self._count)

    def _count(self, _: Tensor) -> None:
        self.calls += 1
        if self.calls == 3:
            raise ValueError("the third one")

    def forward(self, value: Tensor) -> Tensor:
        return self.inner(value)


def test_a_failure_names_the_half() -> None:
    """What fails with gradients of weights fails in W, which is named."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), nn.Tanh(), _Breaks(), nn.Linear(6, 3)]
    model, task = pipelines.split_by_hand(layers, "sgd")
    plan = pipelines.split_backwards(pipelines.plan_of([2], [0, 0], "flush", 4, layers=4))
    with pytest.raises(RankError, match=r"action 1W2 \(stage 1, micro-batch 2\).*the third one"):
        pipelines.train(plan, pipelines.pattern_of(plan, 2), model, task, 1)


def drawn(seed: int, *, step: bool, offload: bool = False) -> Plan:
    """A random plan of eight layers with split backwards, periodic or of a whole step."""
    rng = Random(f"{seed} runtime")
    chain = plans_split.weighed(rng, plans.random_chain(rng, 8))
    cluster = plans.random_cluster(rng, 1 + seed % 4, "full")
    stages = plans.random_stages(rng, 8, len(cluster.gpus))
    stages = tuple(plans_split.splitting(rng, chain, stage) for stage in stages)
    used = {stage.gpu for stage in stages}
    if not any(stage.split_backward for stage in stages) or len(used) < len(cluster.gpus):
        return drawn(seed + 4, step=step, offload=offload)
    plan = plans.scheduled(rng, chain, cluster, stages, 1 if step else 1 + seed % 2)
    plan = plan.model_copy(update={"semantics": "flush", "microbatches": 5})
    plan = plans_split.step_plan(rng, plan, 5) if step else plan
    if not offload:
        return plan
    plan = plans_offload.offloading(rng, plan)
    away = any(
        op.kind is OpKind.OFFLOAD and plan.stages[op.stage].split_backward for op in plan.ops
    )
    return plan if away else drawn(seed + 4, step=step, offload=True)


@grids.each_pair(seed=range(4), step=[False, True], offload=[False, True])
def test_lowered_plans_train_exactly(seed: int, step: bool, offload: bool) -> None:
    """Plans whose W come at any time behind I: losses and weights equal one process.

    What is kept between F and I may wait on the host.
    """
    plan = drawn(seed, step=step, offload=offload)
    model, task = pipelines.toy("adamw")
    expected = reference.train("flush", *pipelines.toy("adamw"), 3, plan.microbatches, 3)
    outcome = pipelines.train(plan, lowering.lower(plan), model, task, 3)
    assert outcome.losses == expected.losses
    for name, value in outcome.weights.items():
        assert torch.equal(value, expected.weights[name]), name


FAMILIES = ["GPT-2", "GPT-2, tied", "ResNet", "T5", "Llama"]
RANKS = [2, 4]


def optimized(family: str, optimizer: str, **fields: Any) -> tuple[SplitModel, Task]:
    """A family with another optimizer; `fields` are other ones of the task."""
    model, task = models.make(family)
    return model, replace(task, optimizer=pipelines.OPTIMIZERS[optimizer], **fields)


@grids.each_value(family=FAMILIES, optimizer=["sgd", "adamw"], ranks=RANKS)
def test_step_plans_train_families_exactly(family: str, optimizer: str, ranks: int) -> None:
    """With dropout, batch norm, clipping, and weights tied across ranks."""
    plan = drawn(ranks - 1, step=True)
    assert len(plan.cluster.gpus) == ranks
    model, task = optimized(family, optimizer)
    expected = reference.train("flush", *optimized(family, optimizer), 3, plan.microbatches, 3)
    outcome = pipelines.train(plan, lowering.lower(plan), untie(model, task.tied), task, 3)
    assert outcome.losses == expected.losses
    assert outcome.weights.keys() == expected.weights.keys()
    for name, value in outcome.weights.items():
        assert torch.equal(value, expected.weights[name]), name


@functools.cache
def family_chain(family: str, optimizer: str) -> Chain:
    """Bytes as measured, times that make every op last."""
    return lasting(measured_chain(*optimized(family, optimizer, clip_norm=None)), halves=True)


@grids.each_value(family=FAMILIES, optimizer=["sgd", "adamw"], ranks=RANKS)
def test_peak_of_a_step_plan_of_families(family: str, optimizer: str, ranks: int) -> None:
    """Every rank's measured peak equals `peak_bytes`, to the byte (clipped, but for the norms).

    T5 may take less: its encoder's output, which weights of several layers need, counts for each.
    """
    chain = family_chain(family, optimizer)
    plan = stepped(test_memory.planned(chain, ranks, "flush", 1, ranks), ranks)
    model, task = optimized(family, optimizer, clip_norm=None)
    peaks = [row.peak_bytes for row in plan.memory]
    measured = test_memory.measured(plan, task, layers=model)
    if family == "T5":
        assert all(peak <= most for peak, most in zip(measured, peaks, strict=True))
        assert sum(peaks) - sum(measured) <= 0.02 * sum(peaks)
    else:
        assert measured == peaks


def stepped(plan: Plan, seed: int) -> Plan:
    """A valid step plan of the stages of `plan`, all but the first of them split."""
    split = pipelines.split_backwards(plan)
    plan = plans.settle(plans_split.step_plan(Random(seed), split, plan.microbatches))
    assert not [found for found in verify(plan) if found.rule is not Rule.DIGESTS]
    assert any(stage.split_backward for stage in plan.stages)
    return plan


@grids.first(8, seed=range(12))
def test_every_action_ends_when_the_simulator_says(seed: int) -> None:
    """All ends of all actions of all ranks over two steps on the virtual clock: difference 0."""
    plan = plans_split.random_split_plan(seed)
    pattern = lowering.lower(plan)
    got = run_ranks(len(plan.cluster.gpus), lambda rank: dry_runs.ran(plan, pattern, 2, rank))
    assert got == dry_runs.simulated(plan, pattern, 2)


def planned(name: str, shape: tuple[int, int, int], *, again: bool = False) -> Plan:
    """A valid plan in which all stages but the first are split."""
    gpus, k, seed = shape
    plain = test_memory.planned(test_memory.profiled(name), gpus, "flush", k, seed)
    stages = pipelines.split_backwards(plain).stages
    if again:
        stages = tuple(plans.recomputing(Random(seed), stage) for stage in stages)
    assert any(stage.split_backward for stage in stages)
    plan = test_memory.planned(test_memory.profiled(name), gpus, "flush", k, seed, stages)
    assert not [found for found in verify(plan) if found.rule is not Rule.DIGESTS]
    return plan


@grids.each_value(name=test_memory.ROWS, shape=test_memory.SHAPES)
def test_peak_is_as_planned(name: str, shape: tuple[int, int, int]) -> None:
    """Every rank's measured peak equals `peak_bytes`, to the byte."""
    plan = planned(name, shape)
    peaks = [row.peak_bytes for row in plan.memory]
    assert test_memory.measured_of(plan, test_memory.TASKS[name]) == peaks


@grids.each_value(name=test_memory.ROWS, shape=test_memory.SHAPES)
def test_what_is_computed_again_takes_no_more(name: str, shape: tuple[int, int, int]) -> None:
    """With runs computed again in I, no rank holds more than `peak_bytes`; (V3) is a bound.

    But for the sum that compares the second forward with the first.
    """
    plan = planned(name, shape, again=True)
    peaks = test_memory.measured_of(plan, test_memory.TASKS[name])
    planned_peaks = [row.peak_bytes for row in plan.memory]
    assert all(peak <= most + SUM_BYTES for peak, most in zip(peaks, planned_peaks, strict=True))
    assert sum(planned_peaks) - sum(peaks) <= 0.03 * sum(planned_peaks)


@grids.each_value(shape=test_memory.SHAPES[1:3])
def test_peak_of_a_graph_is_as_planned(shape: tuple[int, int, int]) -> None:
    """Of layers that are exported graphs, to the byte."""
    plan = planned("gpt2", shape)
    peaks = [row.peak_bytes for row in plan.memory]
    assert test_memory.measured_of(plan, test_memory.TASKS["gpt2"]) == peaks
