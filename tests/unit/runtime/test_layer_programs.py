"""Stages whose layers run device programs: one process's bits, the planned bytes to the byte."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random

import pytest
import torch
from torch import nn

from pipeplan import lowering, tasks
from pipeplan.capture import profile_task, split
from pipeplan.chain import Chain, OperatorProgram
from pipeplan.errors import InputError
from pipeplan.layer_options import task_options
from pipeplan.plan import Plan, Remat, Semantics, Stage
from pipeplan.runtime.parameters.tied_parameters import untie
from pipeplan.task import Task
from pipeplan.testing import reference
from pipeplan.verifier import verify
from tests import grids, pipelines
from tests.unit.runtime import test_memory

GPUS, STEPS = 2, 3
TASKS: dict[str, Callable[[], Task]] = {
    "gpt2": partial(tasks.gpt2, batch=2, dropout=0.1),
    "t5": lambda: replace(tasks.t5(batch=2), tied="synchronize"),
    "llama": partial(tasks.llama, batch=2),
    "resnet": partial(tasks.resnet, width=8, batch=4),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}
SEMANTICS: tuple[Semantics, ...] = ("flush", "2bw")


def made(name: str, optimizer: str) -> Task:
    """A task, with the same first weights each time."""
    torch.manual_seed(0)
    return replace(TASKS[name](), optimizer=OPTIMIZERS[optimizer])


@functools.cache
def profiled(name: str, optimizer: str) -> Chain:
    """Its chain with options; times such that every op lasts."""
    task = made(name, optimizer)
    chain = profile_task(task, repeats=1, warmup=0)
    chain = chain.model_copy(update={"layers": test_memory.lasting(chain.layers)})
    chain = task_options(chain, task, seconds=20)
    return chain.model_copy(update={"task_digest": None})


def planned(name: str, optimizer: str, semantics: Semantics, seed: int = 1) -> Plan:
    """Most layers that have options run one, drawn by `seed`."""
    chain = profiled(name, optimizer)
    plain = test_memory.planned(chain, GPUS, semantics, 1, seed)
    return with_options(chain, plain, semantics, seed)


def with_options(chain: Chain, plain: Plan, semantics: Semantics, seed: int) -> Plan:
    """The plan with options drawn for its layers."""
    draw = Random(seed)

    def chosen(stage: Stage) -> Stage:
        pairs = tuple(
            (layer, draw.randrange(len(chain.layers[layer].options)))
            for layer in range(stage.first, stage.last + 1)
            if chain.layers[layer].options and draw.random() < 0.8
        )
        return stage.model_copy(update={"remat": Remat(programs=pairs) if pairs else None})

    stages = tuple(map(chosen, plain.stages))
    plan = test_memory.planned(chain, GPUS, semantics, 1, seed, stages)
    assert verify(plan) == ()
    return plan


@grids.each_pair(name=list(TASKS), optimizer=list(OPTIMIZERS), semantics=list(SEMANTICS))
def test_bits_are_those_of_one_process(name: str, optimizer: str, semantics: Semantics) -> None:
    """Losses, weights and buffers equal those of a run without options in one process."""
    plan = planned(name, optimizer, semantics)
    assert sum(len(stage.remat.programs) for stage in plan.stages if stage.remat) >= 3
    task = made(name, optimizer)
    expected = reference.train(semantics, split(task), task, STEPS, plan.microbatches, 3)
    task = made(name, optimizer)
    model = untie(split(task), task.tied)
    found = pipelines.train(plan, lowering.lower(plan), model, task, STEPS)
    assert found.losses == expected.losses
    assert found.weights.keys() == expected.weights.keys()
    for key, value in expected.weights.items():
        assert torch.equal(found.weights[key], value), key


@grids.each_value(name=["gpt2", "llama", "resnet"], semantics=list(SEMANTICS), seed=[1, 2])
def test_peaks_are_as_planned(name: str, semantics: Semantics, seed: int) -> None:
    """Every rank's measured peak equals `peak_bytes`, to the byte."""
    plan = planned(name, "adamw", semantics, seed)
    peaks = test_memory.measured(plan, made(name, "adamw"))
    assert peaks == [row.peak_bytes for row in plan.memory]


@grids.each_value(semantics=list(SEMANTICS), seed=[1, 2])
def test_what_rides_along_may_count_twice(semantics: Semantics, seed: int) -> None:
    """The encoder's output, where an earlier layer keeps it (M5): no more is too much."""
    plan = planned("t5", "adamw", semantics, seed)
    peaks = test_memory.measured(plan, made("t5", "adamw"))
    encoded = max(layer.saved_passing_bytes for layer in plan.chain.layers)
    for peak, row in zip(peaks, plan.memory, strict=True):
        assert 0 <= row.peak_bytes - peak <= encoded


def run(plan: Plan, task: Task) -> None:
    """One step of `plan`."""
    pipelines.train(plan, lowering.lower(plan), untie(split(task), task.tied), task, 1)


def small() -> tuple[Plan, Task]:
    """Two stages, one layer of which runs a program."""
    plan = planned("gpt2", "sgd", "flush")
    return plan, made("gpt2", "sgd")


def changed(plan: Plan, **update: object) -> Plan:
    """The plan with all programs of its chain changed."""
    programs = tuple(each.model_copy(update=update) for each in plan.chain.programs)
    chain = plan.chain.model_copy(update={"programs": programs})
    return plan.model_copy(update={"chain": chain})


def test_a_program_of_another_graph_is_refused() -> None:
    """The error names the layer, both digests and the next step."""
    plan, task = small()
    need = r"stage \d, layer '.*': got a graph of operators with digest \w{12}, need 000000000000"
    with pytest.raises(InputError, match=need + ".*Profile with --options"):
        run(changed(plan, graph_digest="0" * 64), task)


def test_a_program_that_breaks_a_rule_is_refused() -> None:
    """The error names the layer and the rule."""
    plan, task = small()
    with pytest.raises(InputError, match=r"layer '.*': device program: the end: \(A11\)"):
        run(changed(plan, text="pipeplan-device-program/1\n"), task)


def test_a_layer_without_that_option_is_refused() -> None:
    """The error says how many it has."""
    plan, task = small()
    stage = next(each for each in plan.stages if each.remat)
    assert stage.remat is not None
    pairs = ((stage.remat.programs[0][0], 99),)
    wrong = stage.model_copy(update={"remat": Remat(programs=pairs)})
    stages = tuple(wrong if each is stage else each for each in plan.stages)
    with pytest.raises(InputError, match="got option 99, need one of its"):
        run(plan.model_copy(update={"stages": stages}), task)


def test_hooks_on_gradients_are_refused() -> None:
    """A program would not call them."""
    plan, task = small()
    model = untie(split(task), task.tied)
    for layer in model.layers:
        for parameter in layer.parameters():
            parameter.register_hook(lambda gradient: gradient)
    with pytest.raises(InputError, match="hook"):
        pipelines.train(plan, lowering.lower(plan), model, task, 1)


class Numbers(nn.Module):
    """Reads values, which no graph can hold."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value * float(value.detach().abs().max())


def test_a_layer_that_no_graph_holds_has_no_options_and_says_why() -> None:
    """The reason stands in the chain, once, with the layers' names."""
    rows = torch.randn(4, 6)
    task = Task(
        model=[nn.Linear(6, 6), Numbers(), nn.Linear(6, 6), Numbers(), nn.Linear(6, 1)],
        loss=nn.functional.mse_loss,
        optimizer=OPTIMIZERS["sgd"],
        data=lambda _: (rows, torch.zeros(4, 1)),
    )
    said: list[str] = []
    chain = task_options(
        profile_task(task, repeats=1, warmup=0), task, seconds=5, progress=said.append
    )
    assert not chain.layers[1].options
    why = str(chain.device["without_options"])
    assert why.endswith(": 1:Numbers, 3:Numbers")
    assert [line for line in said if line.startswith("no options")] == [f"no options: {why}"]


def test_options_are_no_quicker_and_each_is_better_in_something() -> None:
    """Equal layers share their programs; every option keeps less than the layer itself."""
    chain = profiled("gpt2", "sgd")
    digests = {each.graph_digest for each in chain.programs}
    with_any = [layer for layer in chain.layers if layer.options]
    assert len(with_any) > len(digests)
    for layer in with_any:
        for option in layer.options:
            mine = layer.under(option)
            assert mine.forward_ns >= layer.forward_ns
            assert mine.backward_ns >= layer.backward_ns
            assert mine.saved_bytes < layer.saved_bytes
    used = {option.program for layer in with_any for option in layer.options}
    assert used == set(range(len(chain.programs)))
    assert all(isinstance(each, OperatorProgram) for each in chain.programs)
