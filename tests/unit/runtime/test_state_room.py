"""An optimizer that keeps more than the plan's chain counts is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pipeplan import Pipeline
from pipeplan.capture import profile_task
from pipeplan.errors import InputError
from pipeplan.gradients import MakeOptimizer
from pipeplan.plan import Semantics
from pipeplan.runtime.parameters.optimizer_factory import OptimizerFactory
from pipeplan.runtime.transport.base import Transport
from pipeplan.testing.in_process import run_ranks
from tests import launch_task, pipelines

PLAIN: MakeOptimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
MOMENTUM, ADAMW = pipelines.OPTIMIZERS["sgd"], pipelines.OPTIMIZERS["adamw"]


def run(profiled: MakeOptimizer, trained: MakeOptimizer, semantics: Semantics) -> None:
    """Two ranks train one step with a plan of a chain that was profiled with `profiled`."""
    task = replace(launch_task.task(0), optimizer=profiled)
    chain = launch_task.leveled(profile_task(task, repeats=1, warmup=0))
    plan = launch_task.plan_of(chain, 2, semantics)

    def work(transport: Transport) -> None:
        task = replace(launch_task.task(0), optimizer=trained)
        with Pipeline(task, plan, transport=transport) as pipeline:
            pipeline.run(1)

    run_ranks(2, work)


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
@pytest.mark.parametrize(
    ("profiled", "trained", "told"),
    [
        (PLAIN, ADAMW, r"AdamW keeps \d+ B .* has 0 B"),
        (PLAIN, torch.optim.Adagrad, r"Adagrad keeps \d+ B .* has 0 B"),  # made before any step
        (MOMENTUM, ADAMW, r"AdamW keeps \d+ B .* has [1-9]\d* B"),
    ],
)
def test_more_state_than_planned_is_refused(
    profiled: MakeOptimizer, trained: MakeOptimizer, told: str, semantics: Semantics
) -> None:
    """With both sizes, the layer and what to do; memory would be more than planned."""
    with pytest.raises(InputError, match=f"{told}.*Profile and plan again"):
        run(profiled, trained, semantics)


@pytest.mark.parametrize("profiled", [ADAMW, MOMENTUM])
def test_as_much_state_or_less_is_trained(profiled: MakeOptimizer) -> None:
    """The optimizer of the profile, and one that keeps less."""
    run(profiled, MOMENTUM, "flush")


def test_copies_of_several_layers_have_the_room_of_each() -> None:
    """One optimizer steps them: AdamW keeps two states and a counter of each."""
    weights = [torch.nn.Parameter(torch.zeros(8)) for _ in range(2)]
    room = 2 * weights[0].nbytes + 4
    rooms = {weight: (f"layer{number}", room) for number, weight in enumerate(weights)}
    sums = {weight: torch.ones(8) for weight in weights}
    copies = [{weight: weight for weight in weights}]
    OptimizerFactory(ADAMW, rooms=rooms).begin(copies, 0).step(sums)
    less = rooms | {weights[1]: ("layer1", room - 1)}
    with pytest.raises(InputError, match=r"136 B of states for layer 'layer0, layer1', .* 135 B"):
        OptimizerFactory(ADAMW, rooms=less).begin(copies, 0).step(sums)
