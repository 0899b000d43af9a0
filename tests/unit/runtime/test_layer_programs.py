"""Stages whose layers run device programs: one process's bits, the planned bytes to the byte."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

from pipeplan import Pipeline, lowering, tasks
from pipeplan.capture import profile_task
from pipeplan.chain import Chain, OperatorProgram
from pipeplan.cluster import uniform
from pipeplan.errors import InputError
from pipeplan.layer_options import programs, task_options
from pipeplan.plan import Plan, Remat, Semantics, Stage
from pipeplan.runtime.parameters.tied_parameters import untie
from pipeplan.runtime.transport.base import Transport
from pipeplan.split_model import SplitModel
from pipeplan.task import Task, Tied
from pipeplan.testing import reference
from pipeplan.testing.in_process import run_ranks
from pipeplan.verifier import verify
from tests import grids, launch_task, pipelines, short_networks
from tests.captured import captured, lasting, measured_chain
from tests.unit.runtime import test_memory

GPUS, STEPS = 2, 3
SECONDS = 2
"""For the search of programs."""
TASKS: dict[str, Callable[[], Task]] = {
    "gpt2": partial(short_networks.gpt2, batch=2),
    "t5": lambda: replace(short_networks.t5(batch=2), tied="synchronize"),
    "llama": partial(tasks.llama, batch=2),
    "resnet": partial(short_networks.resnet, width=8, batch=4, side=32),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
}
SEMANTICS: tuple[Semantics, ...] = ("flush", "2bw")


def made(name: str, optimizer: str = "adamw") -> tuple[SplitModel, Task]:
    """A task, and its layers with the same first weights each time."""
    model, task = captured(TASKS.get(name, masked))
    return model, replace(task, optimizer=OPTIMIZERS[optimizer])


@functools.cache
def profiled(name: str) -> Chain:
    """Its chain under AdamW, with options; times such that every op lasts.

    Some budgets of each layer are enough here, and the layers are not captured a second time.
    """
    model, task = made(name)
    chain = lasting(measured_chain(model, task), halves=True)
    chain = chain.model_copy(update={"task_digest": model.digest()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[task_options.__module__], "_split", lambda *_: model)
        patch.setattr(programs, "_SAVED", (0.55, 0.0))
        patch.setattr(programs, "_PEAKS", ((0.85, None), (0.7, 0)))
        chain = task_options(chain, task, seconds=SECONDS)
    return chain.model_copy(update={"task_digest": None})


def planned(name: str, semantics: Semantics, seed: int = 1) -> Plan:
    """Most layers that have options run one, drawn by `seed`."""
    chain = profiled(name)
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


@grids.each_value(
    name=["gpt2", "t5", "resnet"], optimizer=list(OPTIMIZERS), semantics=list(SEMANTICS)
)
def test_bits_are_those_of_one_process(name: str, optimizer: str, semantics: Semantics) -> None:
    """Losses, weights and buffers equal those of a run without options in one process."""
    plan = planned(name, semantics)
    assert sum(len(stage.remat.programs) for stage in plan.stages if stage.remat) >= 3
    model, task = made(name, optimizer)
    expected = reference.train(semantics, model, task, STEPS, plan.microbatches, 3)
    model = untie(model, task.tied)
    found = pipelines.train(plan, lowering.lower(plan), model, task, STEPS)
    assert found.losses == expected.losses
    assert found.weights.keys() == expected.weights.keys()
    for key, value in expected.weights.items():
        assert torch.equal(found.weights[key], value), key


@pytest.mark.long
@grids.each_pair(name=["llama"], optimizer=list(OPTIMIZERS), semantics=list(SEMANTICS))
def test_bits_of_llama(name: str, optimizer: str, semantics: Semantics) -> None:
    """So do those of gates, RMS norms and rotated positions."""
    test_bits_are_those_of_one_process(name, optimizer, semantics)


@grids.each_value(name=["gpt2", "resnet"], semantics=list(SEMANTICS), seed=[1, 2])
def test_peaks_are_as_planned(name: str, semantics: Semantics, seed: int) -> None:
    """Every rank's measured peak equals `peak_bytes`, to the byte."""
    plan = planned(name, semantics, seed)
    model, task = made(name)
    peaks = test_memory.measured(plan, task, layers=model)
    assert peaks == [row.peak_bytes for row in plan.memory]


@grids.each_value(semantics=list(SEMANTICS), seed=[1, 2])
def test_what_rides_along_may_count_twice(semantics: Semantics, seed: int) -> None:
    """The encoder's output, where an earlier layer keeps it (M5): no more is too much."""
    plan = planned("t5", semantics, seed)
    model, task = made("t5")
    peaks = test_memory.measured(plan, task, layers=model)
    encoded = max(layer.saved_passing_bytes for layer in plan.chain.layers)
    for peak, row in zip(peaks, plan.memory, strict=True):
        assert 0 <= row.peak_bytes - peak <= encoded


class Masked(nn.Module):
    """Reads its input again in every block, for a mask; the outer layers share weights."""

    def __init__(self, width: int = 8, words: int = 12) -> None:
        super().__init__()
        self.table = nn.Embedding(words, width)
        blocks = (
            nn.Sequential(
                nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.GELU(), nn.Dropout(0.1)
            )
            for _ in range(2)
        )
        self.blocks = nn.ModuleList(blocks)
        self.back = nn.ModuleList(nn.Linear(3 * width, width) for _ in range(2))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.table.weight
        self.back[1].weight = self.back[0].weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Which word comes next, for each of the first ones."""
        value = self.table(words)
        for block, back in zip(self.blocks, self.back, strict=True):
            value = value + torch.tanh(back(block(value))) * (words > 2)[..., None]
        logits: torch.Tensor = self.head(value)
        return logits.flatten(0, 1)


def masked() -> Task:
    """Some words, and which ones come next."""

    def data(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        words = torch.randint(12, (4, 6), generator=torch.Generator().manual_seed(number))
        return words[:, :-1], words[:, 1:].flatten()

    loss = nn.functional.cross_entropy
    return Task(model=Masked(), loss=loss, optimizer=OPTIMIZERS["adamw"], data=data)


def masked_plan(semantics: Semantics, tied: Tied, *, clips: bool) -> Plan:
    """Three stages on two GPUs, the outer two on one; every layer that can runs a program."""
    chain = profiled("masked").model_copy(update={"tied": tied})
    last = len(chain.layers) - 1
    edges = [(0, 2), (3, last - 2), (last - 1, last)]
    stages = tuple(Stage(id=i, layers=edge, gpu=i % 2) for i, edge in enumerate(edges))
    plain = test_memory.planned(chain, GPUS, semantics, 1, 1, stages)
    roomy = plain.model_copy(update={"cluster": uniform(GPUS, 2**30, latency_ns=10)})
    plan = launch_task.with_programs(roomy)
    return launch_task.waiting(plan) if clips else plan


@grids.each_value(
    semantics=list(SEMANTICS),
    tied=["colocate", "synchronize"],
    clips=[False, True],
    resumes=[False, True],
)
def test_beside_all_else_that_trains(
    semantics: Semantics, tied: Tied, clips: bool, resumes: bool
) -> None:
    """Layers that are fed, tied weights, clipped gradients, a second run from a first one's state.

    Losses and weights equal those of one process that trains at a stretch.
    """
    plan = masked_plan(semantics, tied, clips=clips)
    assert verify(plan) == ()
    model, task = made("masked")
    ran = {layer for stage in plan.stages if stage.remat for layer, _ in stage.remat.programs}
    assert any(model.fed_to(layer) for layer in ran)
    sharing = [i for i, names in enumerate(model.fqns) if "back.0.weight" in names.values()]
    assert len(sharing) == 2
    assert ran.issuperset(sharing)
    task = replace(task, tied=tied, clip_norm=0.05 if clips else None)
    expected = reference.train(semantics, model, task, STEPS, plan.microbatches, 3)
    assert not clips or max(expected.norms) > 0.05
    found: dict[str, torch.Tensor] = {}
    losses: list[float] = []
    for steps in (STEPS - 1, 1) if resumes else (STEPS,):
        parts = trained(plan, task, steps, found)
        found = {key: value for part, _ in parts for key, value in part.items()}
        losses += next(told for _, told in parts if told)
    m = plan.microbatches
    assert losses == [sum(expected.losses[i : i + m]) / m for i in range(0, STEPS * m, m)]
    for key, value in expected.weights.items():
        assert torch.equal(found[f"model.{key}"], value), key


def trained(
    plan: Plan, task: Task, steps: int, state: Mapping[str, Any]
) -> list[tuple[dict[str, Any], list[float]]]:
    """What each rank has after `steps` more steps, from `state` on where there is one."""
    torch.manual_seed(0)
    task = replace(task, model=Masked())

    def body(transport: Transport) -> tuple[dict[str, Any], list[float]]:
        with Pipeline(task, plan, seed=3, transport=transport) as pipeline:
            if state:
                pipeline.load_state_dict(state)
            losses = pipeline.run(steps)
            return copy.deepcopy(pipeline.state_dict()), losses

    return run_ranks(GPUS, body)


def run(plan: Plan, model: SplitModel, task: Task) -> None:
    """One step of `plan`."""
    pipelines.train(plan, lowering.lower(plan), untie(model, task.tied), task, 1)


def small() -> tuple[Plan, SplitModel, Task]:
    """Two stages, one layer of which runs a program."""
    return planned("gpt2", "flush"), *made("gpt2", "sgd")


def changed(plan: Plan, **update: object) -> Plan:
    """The plan with all programs of its chain changed."""
    others = tuple(each.model_copy(update=update) for each in plan.chain.programs)
    chain = plan.chain.model_copy(update={"programs": others})
    return plan.model_copy(update={"chain": chain})


def test_a_program_of_another_graph_is_refused() -> None:
    """The error names the layer, both digests and the next step."""
    plan, model, task = small()
    need = r"stage \d, layer '.*': got a graph of operators with digest \w{12}, need 000000000000"
    with pytest.raises(InputError, match=need + ".*Profile with --options"):
        run(changed(plan, graph_digest="0" * 64), model, task)


def test_a_program_that_breaks_a_rule_is_refused() -> None:
    """The error names the layer and the rule."""
    plan, model, task = small()
    with pytest.raises(InputError, match=r"layer '.*': device program: the end: \(A11\)"):
        run(changed(plan, text="pipeplan-device-program/1\n"), model, task)


def test_a_layer_without_that_option_is_refused() -> None:
    """The error says how many it has."""
    plan, model, task = small()
    stage = next(each for each in plan.stages if each.remat)
    assert stage.remat is not None
    pairs = ((stage.remat.programs[0][0], 99),)
    wrong = stage.model_copy(update={"remat": Remat(programs=pairs)})
    stages = tuple(wrong if each is stage else each for each in plan.stages)
    with pytest.raises(InputError, match="got option 99, need one of its"):
        run(plan.model_copy(update={"stages": stages}), model, task)


def test_hooks_on_gradients_are_refused() -> None:
    """A program would not call them."""
    plan, model, task = small()
    for layer in model.layers:
        for parameter in layer.parameters():
            parameter.register_hook(lambda gradient: gradient)
    with pytest.raises(InputError, match="hook"):
        run(plan, model, task)


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
    chain = profiled("gpt2")
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
