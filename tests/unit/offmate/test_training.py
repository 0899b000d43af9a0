"""Tasks that train under a plan of states on the host end as plain training does."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from pipeplan.errors import InputError
from pipeplan.offmate import MachineLimits, StateTraining, measured_problem
from pipeplan.remat.states import StatePlan
from pipeplan.task import Task
from tests import odd_models, pipelines
from tests.offmate_tasks import (
    check_against_plain,
    check_bits,
    experts,
    odd_model,
    perceptrons,
    planned,
    tables,
    train_plainly,
)


@dataclass(frozen=True)
class _Case:
    """A share of the room, the host's speed of updates, the bandwidth; what the plan must have."""

    optimizer: str
    share: float
    host_update: int
    bandwidth: int
    has: frozenset[str]


CASES = (
    _Case("adamw", 0.7, 1_372_661, 1_320_288, frozenset({"waits", "ahead", "recompute"})),
    _Case("adamw", 0.7, 1_557_017, 20_017_238, frozenset({"waits", "offload", "both sides"})),
    _Case("momentum", 0.7, 6_016_481, 16_418_211, frozenset({"offload", "host"})),
    _Case("momentum", 0.7, 0, 10**7, frozenset({"offload", "states move"})),
)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_bits_are_plain_trainings_and_bytes_are_the_judges(case: _Case) -> None:
    """Over several steps, with gradients that wait for the next one and values that came ahead."""
    make = partial(perceptrons, case.optimizer)
    plan = planned(make(), case.share, case.host_update, case.bandwidth)
    assert case.has <= _features(plan)
    check_against_plain(make, plan)


@pytest.mark.parametrize(
    ("optimizer", "share", "host_update", "bandwidth"),
    [("amsgrad", 0.6, 3 * 10**6, 10**6), ("sgd", 0.9, 0, 10**7), ("momentum", 0.8, 10**7, 10**6)],
)
def test_odd_layers_train_the_same(
    optimizer: str, share: float, host_update: int, bandwidth: int
) -> None:
    """Tied and frozen parameters, batch statistics, dropout, views, outputs that are kept."""
    make = partial(odd_model, optimizer)
    check_against_plain(make, planned(make(), share, host_update, bandwidth))


@pytest.mark.parametrize("case", CASES[1:], ids=range(1, len(CASES)))
def test_what_the_first_micro_batch_does_not_reach_is_trained(case: _Case) -> None:
    """Parameters that only later steps give gradients; steps that give them none skip them."""
    make = partial(experts, case.optimizer)
    plan = planned(make(), case.share, case.host_update, case.bandwidth)
    check_bits(make, plan, 6)


def test_tables_of_layers_stay() -> None:
    """A tensor that is no buffer is nobody's to give up: blocks that leave read it again."""
    make = partial(tables, "momentum")
    plan = planned(make(), 0.7, 0, 10**7)
    assert plan.option_names.count("offload") > 1
    check_against_plain(make, plan)


def test_one_direction_at_a_time() -> None:
    """Where both share the way, steps take longer, copies end in order, and bits are the same."""
    make = partial(perceptrons, "adamw")
    given = (0.6, 0, 2 * 10**6)
    plan = planned(make(), *given, duplex=False)
    assert "states move" in _features(plan)
    assert plan.outcome.makespan_ns > planned(make(), *given).outcome.makespan_ns
    check_against_plain(make, plan)


def _features(plan: StatePlan) -> set[str]:
    """What a plan does that a test wants to see."""
    found, begin = set(plan.option_names), plan.placement
    sides: dict[tuple[int, ...], set[bool]] = {}
    for group, own in zip(plan.problem.groups, plan.step.tensors, strict=True):
        sides.setdefault(group.blocks, set()).add(bool(group.on_host))
        for each in own:
            found |= {"waits"} if each.gradient in begin.device | begin.host else set()
            found |= {"ahead"} if group.on_host and each.value in begin.device else set()
            found |= {"host"} if group.on_host else set()
            found |= {"states move"} if each.states in plan.copied else set()
    found |= {"both sides"} if any(len(each) == 2 for each in sides.values()) else set()
    return found


def test_the_host_updates_beside_the_device() -> None:
    """Its optimizers step in a thread of their own, the device's in the caller's."""
    threads: set[str] = set()

    class Told(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            threads.add(threading.current_thread().name)
            return super().step(closure)

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return Told(parameters, lr=0.1, momentum=0.9)

    task = replace(perceptrons("sgd"), optimizer=optimizer)
    plan = planned(task, 0.85, 1_995_530, 23_023_393)
    threads.clear()
    with StateTraining(task, plan) as training:
        for number in range(2):
            training.step(number)
    assert threads == {"pipeplan-host_0", threading.current_thread().name}


def test_a_step_that_fails_leaves_no_thread() -> None:
    """The lanes beside the device end with the training."""
    task = perceptrons("adamw")
    plan = planned(task, 0.85, 523_017, 1_290_071)

    def data(number: int) -> Any:
        source, target = task.data(number)
        return source, target + 100 * number

    training = StateTraining(replace(task, data=data), plan)
    training.step(0)
    with pytest.raises(IndexError), training:
        training.step(1)
    names = [each.name for each in threading.enumerate()]
    assert not [name for name in names if name.startswith(("pipeplan-host", "pipeplan-back"))]
    with pytest.raises(InputError, match="a step behind its end"):
        training.step(2)


DRAWING = nn.Sequential(odd_models.LayerDrop(), nn.Linear(6, 3))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clip_norm": 1.0}, "clip_norm: got one"),
        ({"optimizer": lambda p: torch.optim.Adafactor(p)}, "need that shape"),
        ({"master_weights": True}, "master_weights"),
        ({"model": DRAWING, "data": pipelines.data}, "module '0' draws from Python's"),
    ],
)
def test_what_single_tensors_cannot_do_is_refused(changes: dict[str, Any], words: str) -> None:
    """Before anything is measured for long."""
    task: Task = replace(perceptrons("sgd"), **changes)
    with pytest.raises(InputError, match=words):
        measured_problem(task, MachineLimits(10**9, 10**9, 10**9))


def test_a_plan_of_another_task_is_refused() -> None:
    """Names and bytes of parameters must be the plan's."""
    plan = planned(perceptrons("sgd"), 1.0, 0, 10**7)
    with pytest.raises(InputError, match="Plan this task"):
        StateTraining(odd_model("sgd"), plan)


def test_measuring_leaves_the_task_as_it_was() -> None:
    """Weights, statistics, gradients, random numbers."""
    task, other = odd_model("adamw"), odd_model("adamw")
    torch.manual_seed(3)
    measured_problem(task, MachineLimits(10**9, 10**9, 10**9))
    first = train_plainly(task, 2)[0]
    torch.manual_seed(3)
    assert first == train_plainly(other, 2)[0]
