"""The task that launch tests train: the toy layers, named so that a plan file can refer to it."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from pipeplan.callbacks import (
    Callback,
    RunEnd,
    RunStart,
    SavedCheckpoint,
    StepMetrics,
    ValidationResult,
)
from pipeplan.capture import profile
from pipeplan.chain import Chain
from pipeplan.cluster import uniform
from pipeplan.plan import Plan, Remat, Semantics, Stage
from pipeplan.repeat import seed_all
from pipeplan.task import LossScale, Task, task_function
from pipeplan.testing import plans, plans_split, reference
from pipeplan.testing.plans import NO_OTHER_TIMES
from pipeplan.validation import Validation
from tests import pipelines

REFERENCE = "tests.launch_task:task"
MICROBATCHES = 6
VALIDATED = 3
"""Micro-batches of validation."""
ROOT = Path(__file__).parents[1]


@task_function
def task(seed: int) -> Task:
    """AdamW on layers with dropout and batch norm, whose skip stays inside one layer."""
    torch.manual_seed(seed)
    layers = pipelines.layers_of(6)
    layers[3:6] = [torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6)]
    return Task(
        model=torch.nn.Sequential(*layers),
        loss=torch.nn.functional.cross_entropy,
        optimizer=pipelines.OPTIMIZERS["adamw"],
        data=pipelines.data,
    )


@task_function
def clipped(seed: int) -> Task:
    """The task, its gradients clipped."""
    return replace(task(seed), clip_norm=0.5)


@task_function
def misread(seed: int) -> Task:
    """With a schedule that asks for losses."""
    return replace(task(seed), scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)  # type: ignore[arg-type]


@task_function
def exiting(seed: int) -> Task:
    """Whose optimizer is a script that ends."""

    def ends(_: object) -> torch.optim.Optimizer:
        raise SystemExit(3)

    return replace(task(seed), optimizer=ends)


class SlowWeights(torch.optim.SGD):
    """Looks at values, and keeps a copy of each parameter from the start, as Lookahead does."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)
        for group in self.param_groups:
            for parameter in group["params"]:
                if not parameter.isfinite().all():
                    raise ValueError("infinite")
                self.state[parameter]["slow"] = parameter.detach().clone()


@task_function
def looking(seed: int) -> Task:
    """With an optimizer that looks at values."""
    return replace(task(seed), optimizer=lambda parameters: SlowWeights(list(parameters)))


@task_function
def validated(seed: int, fails: str = "") -> Task:
    """The task with validation data, a metric, and a callback that writes what it hears.

    In `fails` is `metric`, `data` or the name of an event of which the callback fails.
    """

    def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if fails == "metric":
            raise KeyError("no such class")
        return (output.argmax(1) == target).float().mean()

    def data(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows, classes = pipelines.data(number)
        return (rows[:3] if fails == "data" else rows), classes

    validation = Validation(data=data, microbatches=VALIDATED, metrics={"accuracy": accuracy})
    return replace(task(seed), validation=validation, callbacks=(Told(fails),))


class Told(Callback):
    """Keeps the names and steps of events; fails at one."""

    events: ClassVar[list[tuple[str, int]]] = []

    def __init__(self, fails: str) -> None:
        self._fails = fails

    def start(self, run: RunStart) -> None:
        self._hear("start", run.first_step)

    def step(self, step: StepMetrics) -> None:
        self._hear("step", step.step)

    def validation(self, result: ValidationResult) -> None:
        self._hear("validation", result.step)

    def checkpoint(self, saved: SavedCheckpoint) -> None:
        self._hear("checkpoint", saved.step)

    def end(self, end: RunEnd) -> None:
        self._hear("end", end.step)

    def _hear(self, event: str, step: int) -> None:
        if event == self._fails:
            raise ValueError("full")
        self.events.append((event, step))


class Named(torch.nn.Module):
    """The task's layers on rows that are named; some of them count more than others."""

    def __init__(self, layers: torch.nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, rows: torch.Tensor, *, share: torch.Tensor) -> dict[str, torch.Tensor]:
        """Scores of the classes, and of each row its share."""
        return {"scores": self.layers(rows), "share": share.squeeze(-1)}


def _named_data(microbatch: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    rows, classes = pipelines.data(microbatch)
    return {"rows": rows, "share": rows[:, :1].sigmoid()}, {"classes": classes}


def _named_loss(got: dict[str, torch.Tensor], target: dict[str, torch.Tensor]) -> torch.Tensor:
    each = torch.nn.functional.cross_entropy(got["scores"], target["classes"], reduction="none")
    return (each * got["share"]).mean()


@task_function
def nested(seed: int) -> Task:
    """The task on a dict of tensors and with a dict of outputs; one input goes to the loss."""
    base = task(seed)
    return replace(base, model=Named(base.model), data=_named_data, loss=_named_loss)


@task_function
def compiled(seed: int) -> Task:
    """The task, its layers compiled by a backend that needs no compiler."""
    return replace(task(seed), compile="aot_eager")


@task_function
def spoiled(seed: int, at: int) -> Task:
    """The task, with data that are no numbers from micro-batch `at` on."""
    same = task(seed)

    def data(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        source, target = pipelines.data(number)
        return (source * torch.nan if number >= at else source), target

    return replace(same, data=data)


@task_function
def slow(seed: int, seconds: float, counted: str | None = None) -> Task:
    """The task, whose loss of a micro-batch takes some seconds; a file gets a byte for each."""
    same = task(seed)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if counted is not None:
            with open(counted, "a") as file:
                file.write(".")
        time.sleep(seconds)
        return same.loss(output, target)

    return replace(same, loss=loss)


@task_function
def steep(seed: int, clip_norm: float | None = None, scaled: bool = False) -> Task:
    """The task, with a loss that is finite and whose gradient is not."""
    same = task(seed)

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return same.loss(output, target) + (output * 0).abs().sqrt().sum()

    scale = LossScale() if scaled else None
    return replace(same, loss=loss, clip_norm=clip_norm, loss_scale=scale)


def elsewhere_made(seed: int) -> Task:
    """The task with weights from numpy and Python, which it does not seed, and a shuffled loader.

    The loader is read once, when the task is made; numbers are places in what it gave.
    """
    made = task(seed)
    assert isinstance(made.model, torch.nn.Sequential)
    with torch.no_grad():
        made.model[3].weight.copy_(torch.from_numpy(np.random.standard_normal((6, 6))))
        made.model[5].weight.mul_(random.random())
    rows, classes = zip(*map(pipelines.data, range(40)), strict=True)
    samples = TensorDataset(torch.cat(rows), torch.cat(classes))
    batches = [(x, y) for x, y in DataLoader(samples, batch_size=5, shuffle=True)]
    return replace(made, data=lambda number: batches[number % len(batches)])


def other_data(seed: int) -> Task:
    """The task on other data, as of a loader that each rank shuffles for itself."""
    return replace(task(seed), data=lambda number: pipelines.data(number + 1))


def other_weights(seed: int) -> Task:
    """The task with one layer that does not follow from the seed."""
    made = task(seed)
    with torch.no_grad():
        made.model[3].weight.add_(1)
    return made


@task_function
def narrow(seed: int) -> Task:
    """The task in 16 bits, its sums and what is stepped in 32."""
    same = task(seed)
    wide = {"accumulate": torch.float32, "master_weights": True}
    return replace(same, model=torch.nn.Sequential(Half(), *same.model).bfloat16(), **wide)


class Half(torch.nn.Module):
    """To 16 bits."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """The same rows."""
        return rows.bfloat16()


def other_task(seed: int) -> Task:
    """A model of as many layers with another width."""
    same = task(seed)
    torch.manual_seed(seed)
    layers = list(same.model)
    layers[-1] = torch.nn.Sequential(torch.nn.Dropout(0.1), torch.nn.Linear(6, 4))
    return Task(
        model=torch.nn.Sequential(*layers),
        loss=same.loss,
        optimizer=same.optimizer,
        data=same.data,
    )


@functools.cache
def chain() -> Chain:
    """The task's chain, with times that make every op last."""
    return leveled(profile(REFERENCE, repeats=1, warmup=0))


def leveled(found: Chain) -> Chain:
    """A chain with the same times in every layer, equal wherever it was measured."""
    times = {**NO_OTHER_TIMES, "forward_ns": 300, "backward_ns": 500}
    layers = tuple(layer.model_copy(update=times) for layer in found.layers)
    return found.model_copy(update={"layers": layers})


@functools.cache
def plan(gpus: int, semantics: Semantics, seed: int = 0) -> Plan:
    """A valid plan with two stages per GPU, looped."""
    return plan_of(chain(), gpus, semantics, seed)


def plan_of(of: Chain, gpus: int, semantics: Semantics, seed: int = 0) -> Plan:
    """`plan` of another chain."""
    count = min(2 * gpus, len(of.layers))
    edges = [round(i * len(of.layers) / count) for i in range(count + 1)]
    stages = tuple(
        Stage(id=i, layers=(edges[i], edges[i + 1] - 1), gpu=i % gpus) for i in range(count)
    )
    cluster = uniform(gpus, 2**30, latency_ns=10)
    made = plans.scheduled(Random(seed), of, cluster, stages, 1)
    fields = {
        "semantics": semantics,
        "microbatches": MICROBATCHES,
        "task_digest": of.task_digest,
    }
    return with_room(plans.settle(made.model_copy(update=fields)))


def with_programs(plan: Plan) -> Plan:
    """`plan` in which every layer runs the last of its options, which takes longest."""

    def running(stage: Stage) -> Stage:
        pairs = tuple(
            (layer, len(options) - 1)
            for layer in range(stage.first, stage.last + 1)
            if (options := plan.chain.layers[layer].options)
        )
        return stage.model_copy(update={"remat": Remat(programs=pairs) if pairs else None})

    stages = tuple(map(running, plan.stages))
    made = plans.scheduled(Random(0), plan.chain, plan.cluster, stages, plan.k)
    kept = {name: getattr(plan, name) for name in ("semantics", "microbatches", "task_digest")}
    return with_room(plans.settle(made.model_copy(update=kept)))


def with_room(settled: Plan) -> Plan:
    """The plan with a budget of 1 GiB per GPU."""
    budgets = [row.model_copy(update={"budget_bytes": 2**30}) for row in settled.memory]
    return settled.model_copy(update={"memory": tuple(budgets)})


@functools.cache
def step_plan(gpus: int, seed: int = 0) -> Plan:
    """A valid plan of a whole step, looped, all of whose stages but the first are split."""
    found = profile(REFERENCE, repeats=1, warmup=0)
    layers = tuple(
        after.model_copy(
            update={"backward_weight_ns": 200 if before.backward_weight_ns is not None else None}
        )
        for before, after in zip(found.layers, leveled(found).layers, strict=True)
    )
    looped = plan_of(found.model_copy(update={"layers": layers}), gpus, "flush", seed)
    stages = pipelines.split_backwards(looped).stages
    made = plans.scheduled(Random(seed), looped.chain, looped.cluster, stages, 1)
    kept = {name: getattr(looped, name) for name in ("semantics", "microbatches", "task_digest")}
    made = plans_split.step_plan(Random(seed), made.model_copy(update=kept), MICROBATCHES)
    return with_room(plans.settle(made))


def waiting(plan: Plan) -> Plan:
    """`plan` with room for the gradients of updates that wait for other stages."""
    layers = tuple(
        layer.model_copy(update={"waiting_gradient_bytes": layer.gradient_bytes})
        for layer in plan.chain.layers
    )
    chain = plan.chain.model_copy(update={"layers": layers})
    fields = {"chain": chain, "chain_digest": chain.digest()}
    return with_room(plans.settle(plan.model_copy(update=fields)))


def trained(
    semantics: Semantics,
    steps: int,
    seed: int = 0,
    replicas: Sequence[int] = (),
    make: Callable[[int], Task] = task,
    evaluate: int = 0,
) -> reference.Trained:
    """What one process makes of the task; `replicas` that average, for each step."""
    from pipeplan.capture import split

    seed_all(seed)
    made = make(seed)
    words: dict[str, Any] = {"evaluate": evaluate, "replicas": replicas}
    return reference.train(semantics, split(made), made, steps, MICROBATCHES, seed, **words)


def validation_losses(semantics: Semantics, *steps: int) -> list[float]:
    """What `validated` tells after so many steps in one process."""
    runs = (trained(semantics, each, evaluate=VALIDATED).evaluated for each in steps)
    return [sum(losses) / VALIDATED for losses in runs]
