"""Families of models under half and 30 % of the memory they want: bits, and bytes term by term."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import pytest
from torch import Tensor

from pipeplan import tasks
from pipeplan.chain import Chain
from pipeplan.cluster import Cluster, Host, uniform
from pipeplan.memory_terms import GpuTerms
from pipeplan.plan import Plan, Semantics
from pipeplan.planner import Config, solve
from pipeplan.runtime.parameters.tied_parameters import untie
from pipeplan.runtime.transport.base import Transport
from pipeplan.task import Task
from pipeplan.tasks.resnet import ResNet
from pipeplan.tasks.t5 import SIZES, T5
from pipeplan.tasks.vit import Vit
from pipeplan.testing import reference
from pipeplan.testing.in_process import run_ranks
from tests import pipelines
from tests.captured import captured, chain_of, lasting
from tests.unit.runtime import test_sampled_memory
from tests.unit.runtime.test_exact import equal

MICROBATCHES = 5
STEPS = {"flush": 2, "2bw": 4}
"""The last one is sampled."""


def vit() -> Task:
    """Of eight blocks: one of four blocks is more than 30 % of what a GPU of two holds."""
    return replace(tasks.vit(batch=64), model=Vit((8, 64, 4, 8), 32, 10, 0.1))


def resnet() -> Task:
    """Of sixteen small blocks: the stem of the usual ones is more than 30 % of it all."""
    return replace(tasks.resnet(batch=16), model=ResNet(False, (8, 8), 8, 10))


def t5() -> Task:
    """Of four blocks each, for the same reason; four decoder layers keep the encoder's output."""
    return replace(
        tasks.t5(batch=16), model=T5(replace(SIZES["tiny"], layers=4), dropout=0.1, tied=False)
    )


TASKS: dict[str, Callable[[], Task]] = {
    "GPT-2": partial(tasks.gpt2, batch=16),
    "Llama": partial(tasks.llama, batch=32),
    "ViT": vit,
    "ResNet": resnet,
    "T5": t5,
}
"""With micro-batches that keep more than the states take, as they do where memory is scarce."""
WAYS: dict[str, dict[str, Any]] = {
    "recompute": {"recompute": "auto"},
    "offload": {"offload": "auto"},
}


@functools.cache
def profiled(family: str) -> Chain:
    """Bytes as measured; times such that every run gives the same plan."""
    return lasting(chain_of(TASKS[family]), unit_ns=1000)


def machines(memory: int, gpus: int) -> Cluster:
    """GPUs with a host beside them, on fast links."""
    host = Host(memory_bytes=2**40, bandwidth_bytes_per_s=2 * 10**12)
    found = uniform(gpus, memory, bandwidth_bytes_per_s=10**12, latency_ns=1)
    return found.model_copy(update={"host": host})


def planned(family: str, gpus: int, share: float, semantics: Semantics, way: str) -> Plan:
    """On `share` of the peak that the best contiguous 1F1B plan has without a limit."""
    ample = Config(semantics=semantics, microbatches=MICROBATCHES, method="contiguous", k=1)
    chain = profiled(family)
    peak = max(row.peak_bytes for row in solve(chain, machines(2**40, gpus), ample).memory)
    scarce = Config(
        semantics=semantics,
        microbatches=MICROBATCHES,
        time_limit_s=1,
        deterministic=True,
        workers=1,
        gap=0.05,
        **WAYS[way],
    )
    return solve(chain, machines(int(share * peak), gpus), scarce)


Told = tuple[GpuTerms, dict[int, float], dict[str, Tensor]]


def ran(plan: Plan, family: str, steps: int) -> list[Told]:
    """Of each rank: the bytes of a sampled step, losses, final weights."""
    model, task = captured(TASKS[family])
    model = untie(model, task.tied)

    def work(transport: Transport) -> Told:
        worker, meter, heard = test_sampled_memory.counted(plan, model, task, transport)
        with meter:
            worker.executor.run(0, steps)
        found = meter.memory()
        assert found is not None
        return found[1], heard.losses, pipelines.weights_of(worker)

    return run_ranks(len(plan.cluster.gpus), work)


def check(plan: Plan, family: str) -> None:
    """Losses and weights are those of one process; each term at each rank's peak as predicted."""
    model, task = captured(TASKS[family])
    steps = STEPS[plan.semantics]
    expected = reference.train(plan.semantics, model, task, steps, MICROBATCHES, 0)
    told = ran(plan, family, steps)
    losses = {number: loss for _, heard, _ in told for number, loss in heard.items()}
    assert [losses[number] for number in sorted(losses)] == expected.losses
    assert equal({k: v for _, _, held in told for k, v in held.items()}, expected.weights)
    for row, need, (memory, _, _) in zip(
        plan.memory, test_sampled_memory.predicted(plan), told, strict=True
    ):
        assert row.peak_bytes <= row.budget_bytes
        test_sampled_memory.claimed(plan, row, need)
        test_sampled_memory.same(memory, need)


@pytest.mark.long
@pytest.mark.parametrize("way", ["recompute", "offload"])
@pytest.mark.parametrize("semantics", get_args(Semantics))
@pytest.mark.parametrize("share", [0.5, 0.3])
@pytest.mark.parametrize("gpus", [2, 4])
@pytest.mark.parametrize("family", list(TASKS))
def test_trains_as_planned(
    family: str, gpus: int, share: float, semantics: Semantics, way: str
) -> None:
    """All of them: bits of one process, each term of each stage at the peak to the byte."""
    check(planned(family, gpus, share, semantics, way), family)
