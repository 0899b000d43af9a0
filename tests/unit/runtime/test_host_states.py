"""Runs of plans whose optimizers' states are on the host: bits of one process, planned bytes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from pipeplan.cluster import Host
from pipeplan.plan import Plan, Semantics
from pipeplan.runtime.build import Worker, build
from pipeplan.runtime.checkpoint import named_state
from pipeplan.runtime.data.feed import TaskFeed, Uses
from pipeplan.runtime.parameters.host_update import HostQueue, runs_beside
from pipeplan.runtime.parameters.optimizer_factory import OptimizerFactory
from pipeplan.runtime.parameters.slots import attributes_of
from pipeplan.runtime.parameters.tied_parameters import untie
from pipeplan.runtime.parameters.weights import Weights
from pipeplan.runtime.transport.base import Transport
from pipeplan.split_model import SplitModel
from pipeplan.task import Task, Tied
from pipeplan.testing import plans, reference
from pipeplan.testing.in_process import run_ranks
from pipeplan.verifier import host_states as verified
from tests import grids, pipelines
from tests.captured import captured
from tests.unit.runtime import test_memory as test_runtime_memory
from tests.unit.runtime.test_checkpoint import save_alone
from tests.unit.runtime.test_checkpoint import worker as checkpointed
from tests.unit.runtime.test_exact import equal

HOST = Host(memory_bytes=2**40, bandwidth_bytes_per_s=10**9, update_bytes_per_s=10**9)
STEPS, M = 4, 4


def away(plan: Plan, stages: Sequence[int]) -> Plan:
    """`plan` with the states of some stages on a host."""
    cluster = plan.cluster.model_copy(update={"host": HOST})
    moved = tuple(
        stage.model_copy(update={"states": "host"}) if stage.id in stages else stage
        for stage in plan.stages
    )
    return plan.model_copy(update={"cluster": cluster, "stages": moved})


def trained(plan: Plan, model: SplitModel, task: Task) -> dict[str, torch.Tensor]:
    """All weights, optimizers' states and gradient norms of a run of all ranks."""
    pattern = pipelines.pattern_of(plan, period=3)

    def work(transport: Transport) -> dict[str, torch.Tensor]:
        feed = TaskFeed(task, model, Uses.of(plan, model, transport.rank))
        told = pipelines.Listener()
        ends = plan, pattern, model, task, feed, transport, told
        worker = build(*ends, seed=3, reports=True)
        worker.executor.run(0, STEPS)
        found = named_state.state_of(worker.stages.values())
        norms = {f"norm.{step}": torch.tensor(norm) for step, (norm, _) in told.steps.items()}
        return {name: value.clone() for name, value in found.items()} | norms

    parts = run_ranks(len(plan.cluster.gpus), work)
    return {name: value for part in parts for name, value in part.items()}


@grids.each_pair(semantics=["flush", "2bw"], optimizer=["sgd", "adamw"], stages=[(0, 1, 2), (1,)])
def test_trains_as_on_the_gpus(
    semantics: Semantics, optimizer: str, stages: Sequence[int]
) -> None:
    """Weights of all versions and states of optimizers are those of states on the GPUs.

    And those are the bits of one process.
    """
    plan = pipelines.plan_of([2, 5], [0, 1, 0], semantics, microbatches=M)
    here = trained(plan, *pipelines.toy(optimizer))
    there = trained(away(plan, stages), *pipelines.toy(optimizer))
    assert any(name.startswith("optimizer.") for name in here)
    assert equal(there, here)
    alone = reference.train(semantics, *pipelines.toy(optimizer), STEPS, M, seed=3)
    assert all(torch.equal(there[f"model.{name}"], alone.weights[name]) for name in alone.weights)


def test_the_rank_goes_on_while_the_host_updates() -> None:
    """(U7): the first update ends only when all forwards of the next step have run.

    Schedules move on behind each update.
    """
    ran, updated = threading.Event(), threading.Event()
    forwards: list[None] = []

    class Waits(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            if not updated.is_set():
                assert ran.wait(60)
                updated.set()
            return super().step(closure)

    def hear(*_: Any) -> None:
        forwards.append(None)
        if len(forwards) == 2 * M:
            ran.set()

    model, task = pipelines.toy("sgd")
    model.layers[0].register_forward_hook(hear)

    def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def waiting(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return Waits(parameters, lr=0.1)

    plan = pipelines.plan_of([], [0], "2bw", microbatches=M)
    here = trained(away(plan, (0,)), model, replace(task, optimizer=waiting, scheduler=halving))
    assert updated.is_set()

    def plain(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    model, task = pipelines.toy("sgd")
    task = replace(task, optimizer=plain, scheduler=halving)
    assert equal(trained(plan, model, task), here)


def on_a_host(queue: HostQueue, step: Callable[[], None], *, beside: bool) -> Weights:
    """A layer whose two gradients of step 0 are there; its updates call `step` first."""

    class Tells(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            step()
            return super().step(closure)

    layer = nn.Linear(1, 1, bias=False)
    optimizing = OptimizerFactory(lambda p: Tells(p, lr=1.0))
    attributes = [attributes_of(layer)]
    weights = Weights(
        attributes, optimizing, versions=2, microbatches=2, host=queue, beside=beside
    )
    for _ in range(2):
        weights.begin_graph(0)
        layer(torch.ones(1, 1)).backward()
        weights.end_graph(0)
    return weights


@pytest.mark.parametrize("beside", [False, True])
def test_an_update_ends_when_the_plan_says(beside: bool) -> None:
    """(U6): behind the weights; (U7): behind the gradients."""
    goes_on, made = threading.Event(), threading.Event()

    def step() -> None:
        if beside:
            assert goes_on.wait(60)
        made.set()

    weights = on_a_host(HostQueue(), step, beside=beside)
    weights.update(0)
    assert made.is_set() is not beside
    goes_on.set()
    weights.settle()
    assert made.is_set()


def test_a_host_makes_one_stage_after_the_other() -> None:
    """(U7): the second update of a rank begins behind the first; its gradients come before."""
    second_begun, second_came = threading.Event(), threading.Event()

    def first_step() -> None:
        assert second_came.wait(60)
        assert not second_begun.wait(0.1)

    queue = HostQueue()
    first = on_a_host(queue, first_step, beside=True)
    second = on_a_host(queue, second_begun.set, beside=True)
    first.update(0)
    second.update(0)
    second_came.set()
    first.settle()
    second.settle()
    assert second_begun.is_set()


def test_who_runs_beside() -> None:
    """The runtime and the verifier, each by its own rule, say the same of (U7)."""
    said = []
    for seed in range(60):
        plan = plans.random_plan(seed, memory_model="exact")
        plan = away(plan, range(0, len(plan.stages), 2))
        for stage in plan.stages:
            if stage.states == "host":
                said.append(runs_beside(plan, stage))
                assert said[-1] is verified.runs_beside(plan, stage)
    assert {True, False} == set(said)


def test_what_an_update_raises_ends_the_run() -> None:
    """Behind the rank's back, too."""

    class Broken(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ArithmeticError("no step")

    model, task = pipelines.toy("sgd")
    plan = away(pipelines.plan_of([], [0], "2bw", microbatches=M), (0,))
    with pytest.raises(Exception, match="no step"):
        trained(plan, model, replace(task, optimizer=lambda p: Broken(p, lr=0.1)))


@grids.each_pair(how=["colocate", "synchronize"], semantics=["flush", "2bw"], clip=[False, True])
def test_updates_that_wait(how: Tied, semantics: Semantics, clip: bool) -> None:
    """Shared parameters, their copies, and clipping by a norm of all stages change nothing."""
    gpus = [0, 1, 0] if how == "colocate" else [0, 1, 1]
    plan = pipelines.plan_of([1, 4], gpus, semantics, microbatches=M, layers=5)
    plan = away(plan, (0, 2) if how == "colocate" else (0, 1, 2))
    model, task = pipelines.tied(clip=clip, how=how)
    there = trained(plan, untie(model, how), task)
    model, task = pipelines.tied(clip=clip, how=how)
    here = trained(away(plan, ()), untie(model, how), task)
    assert equal(there, here)


def test_masters_and_half_weights() -> None:
    """Weights in 16 bits: the optimizer steps copies in 32 bits, which are on the host."""

    def narrow(microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows, classes = pipelines.data(microbatch)
        return rows.bfloat16(), classes

    def half() -> tuple[SplitModel, Task]:
        torch.manual_seed(5)
        layers = [nn.Linear(6, width, dtype=torch.bfloat16) for width in (6, 6, 3)]
        model, task = pipelines.split_by_hand(layers, "adamw", data=narrow)
        return model, replace(task, accumulate=torch.float32, master_weights=True)

    plan = pipelines.plan_of([2], [0, 1], "2bw", microbatches=M, layers=3)
    here, there = (trained(away(plan, stages), *half()) for stages in ((), (0, 1)))
    assert any(name.startswith("master.") for name in here)
    assert equal(there, here)


@grids.each_pair(
    name=["mlp", "transformer"], semantics=["flush", "2bw"], shape=[(2, 1, 1), (3, 2, 2)]
)
def test_bytes_are_as_planned(
    name: str, semantics: Semantics, shape: tuple[int, int, int]
) -> None:
    """Every rank's peak and its bytes on the host equal the plan's table, to the byte."""
    gpus, k, seed = shape
    chain = test_runtime_memory.profiled(name)
    plain = test_runtime_memory.planned(chain, gpus, semantics, k, seed)
    plan = plans.settle(away(plain, [stage.id for stage in plain.stages if stage.id % 3]))
    lower = zip(plan.memory, plain.memory, strict=True)
    assert any(row.peak_bytes < before.peak_bytes for row, before in lower)
    model, task = captured(test_runtime_memory.TASKS[name])
    measured = test_runtime_memory.measured_bytes(plan, task, layers=model)
    assert measured == [(row.peak_bytes, row.host_bytes) for row in plan.memory]


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_going_on_from_a_state(semantics: Semantics) -> None:
    """A run that goes on from the state of another one is one run, wherever states were."""
    plan = pipelines.plan_of([4], [0, 1], semantics, microbatches=M)
    found = trained(away(plan, (0, 1)), *pipelines.toy("adamw"))
    whole = {name: value for name, value in found.items() if not name.startswith("norm.")}
    pattern = pipelines.pattern_of(plan, period=3)

    def half(
        stages: Sequence[int], first: int, known: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        model, task = pipelines.toy("adamw")
        moved = away(plan, stages)

        def work(transport: Transport) -> dict[str, torch.Tensor]:
            feed = TaskFeed(task, model, Uses.of(moved, model, transport.rank))
            ends = feed, transport, pipelines.Listener()
            worker: Worker = build(moved, pattern, model, task, *ends, seed=3)
            if first:
                named_state.put(worker, first, known, (), 0)
            worker.executor.run(first, STEPS // 2)
            found = named_state.state_of(worker.stages.values())
            return {name: value.clone() for name, value in found.items()}

        return {name: value for part in run_ranks(2, work) for name, value in part.items()}

    for before, after in (((0, 1), (1,)), ((), (0, 1)), ((0,), ())):
        assert equal(half(after, STEPS // 2, half(before, 0, {})), whole)


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_going_on_from_a_checkpoint(tmp_path: Path, semantics: Semantics) -> None:
    """Files that a run with states on its GPU wrote are read into states on the host."""
    alone = save_alone(tmp_path / "c", semantics, "adamw", 2)
    alone.executor.run(2, 2)
    plan = away(pipelines.plan_of([4], [0, 1], semantics, microbatches=6), (0, 1))

    def work(transport: Transport) -> dict[str, torch.Tensor]:
        resumed = checkpointed(plan, "adamw", transport)
        named_state.load(tmp_path / "c", 2, resumed)
        resumed.executor.run(2, 2)
        return named_state.state_of(resumed.stages.values())

    found = {name: value for part in run_ranks(2, work) for name, value in part.items()}
    assert equal(found, named_state.state_of(alone.stages.values()))
