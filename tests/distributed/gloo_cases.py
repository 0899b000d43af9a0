"""`gloo_cases.py RANKS`: many small trainings over one gloo group, each against the reference.

Prints `exact N` on rank 0 where all N cases equal the reference bit for bit.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

from pipeplan import lowering
from pipeplan.plan import Plan
from pipeplan.runtime.build import build
from pipeplan.runtime.data.feed import TaskFeed, Uses
from pipeplan.runtime.parameters.tied_parameters import untie
from pipeplan.runtime.startup.process_group import join
from pipeplan.runtime.transport.gloo import GlooTransport, LocalTransport
from pipeplan.runtime.transport.torchrun_env import TorchrunEnv
from pipeplan.split_model import SplitModel
from pipeplan.task import LossScale, Task
from pipeplan.testing import reference
from pipeplan.testing.plans import random_plan
from tests import models, pipelines
from tests.forked import run_joined

STEPS = 3
MAPS = {
    2: (([4], [0, 1]), ([1, 3, 4, 6], [0, 1, 0, 1, 0]), ([2, 5], [1, 1, 0])),
    4: (([2, 4, 6], [0, 1, 2, 3]), ([1, 3, 4, 5, 7], [0, 1, 2, 3, 1, 0]), ([3, 6], [2, 0, 3])),
}


Make = Callable[[], tuple[SplitModel, Task]]


def scaled() -> tuple[SplitModel, Task]:
    """The toy model with a loss scale that grows every other step."""
    split, task = pipelines.toy("adamw")
    return split, replace(task, loss_scale=LossScale(initial=4.0, interval=2), clip_norm=0.5)


class Reached(nn.Linear):
    """A gradient reaches its weight only in the first half of the toy."""

    def __init__(self, *, first: bool) -> None:
        super().__init__(6, 6)
        self.first = first

    def forward(self, value: Tensor) -> Tensor:
        weight = self.weight if self.first else self.weight.detach()
        return value + nn.functional.linear(value, weight, self.bias)


def half_reached() -> tuple[SplitModel, Task]:
    """Eight layers: the first and the last but one share a weight, which only the first trains."""
    torch.manual_seed(7)
    first, later = Reached(first=True), Reached(first=False)
    later.weight = first.weight
    inner = [nn.Linear(6, 6) for _ in range(5)]
    split, task = pipelines.split_by_hand([first, *inner, later, nn.Linear(6, 3)], "adamw")
    return split, replace(task, tied="synchronize")


def cases(ranks: int) -> list[tuple[Plan, Make]]:
    """Hand-made maps in both modes with both optimizers; random lowered plans; model families."""
    found = [
        (pipelines.plan_of(*shape, semantics, microbatches=6), partial(pipelines.toy, optimizer))
        for shape in MAPS[ranks]
        for semantics, optimizer in (("flush", "sgd"), ("2bw", "sgd"), ("2bw", "adamw"))
    ]
    made = (random_plan(seed, layers=8, gpus=ranks) for seed in range(4))
    toy = partial(pipelines.toy, "adamw")
    away = (
        random_plan(seed, layers=8, gpus=ranks, memory_model="exact", offload=True)
        for seed in range(40, 43)
    )
    random = [(pipelines.without_first_in_place(plan), toy) for plan in (*made, *away)]
    exchanging = [
        (pipelines.plan_of(*shape, semantics, microbatches=6), make)
        for shape in MAPS[ranks][:2]
        for semantics in ("flush", "2bw")
        for make in (
            partial(models.make, "GPT-2, tied"),
            partial(models.make, "T5"),
            scaled,
            half_reached,
        )
    ]
    return [*found, *random, *exchanging]


def same(plan: Plan, make: Make, transport: GlooTransport | LocalTransport) -> bool:
    """Whether one training equals the reference; only rank 0 knows."""
    split, task = make()
    split = untie(split, task.tied)
    pattern = lowering.lower(plan) if plan.ops else pipelines.pattern_of(plan, period=3)
    listener = pipelines.Listener()
    feed = TaskFeed(task, split, Uses.of(plan, split, transport.rank))
    worker = build(plan, pattern, split, task, feed, transport, listener, seed=3)
    worker.executor.run(0, STEPS)
    told = transport.gather((pipelines.weights_of(worker), listener.losses))
    if transport.rank:
        return True
    split, task = make()
    trainer = reference.train_2bw if plan.semantics == "2bw" else reference.train_flush
    expected = trainer(split, task, STEPS, plan.microbatches, seed=3)
    weights = {name: value for part, _ in told for name, value in part.items()}
    losses = {number: value for _, part in told for number, value in part.items()}
    return (
        [losses[number] for number in sorted(losses)] == expected.losses
        and weights.keys() == expected.weights.keys()
        and all(torch.equal(value, expected.weights[name]) for name, value in weights.items())
    )


def work() -> None:
    """All cases of this many ranks."""
    torch.set_num_threads(1)
    transport = join(TorchrunEnv.of(os.environ), 60 * 10**9)
    answers = [same(*case, transport) for case in cases(transport.size)]
    if transport.rank == 0:
        print(f"exact {sum(answers)} of {len(answers)}", flush=True)
    transport.close()
    sys.exit(0 if all(answers) else 1)


if __name__ == "__main__":
    run_joined(work, int(sys.argv[1]))
