"""Tasks that train under a plan of states on the host end as plain training does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
    planned_once,
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

    @property
    def given(self) -> tuple[str, float, int, int]:
        """To plan for."""
        return self.optimizer, self.share, self.host_update, self.bandwidth


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
    plan = planned_once(perceptrons, *case.given)
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
    plan = planned_once(experts, *case.given)
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
    given = ("adamw", 0.6, 0, 2 * 10**6)
    plan = planned_once(perceptrons, *given, duplex=False)
    assert "states move" in _features(plan)
    assert plan.outcome.makespan_ns > planned_once(perceptrons, *given).outcome.makespan_ns
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


@pytest.fixture(scope="module")
def plan() -> StatePlan:
    """Of perceptrons: both sides update, gradients wait."""
    return planned_once(perceptrons, *CASES[1].given)


class _CountingLoss(nn.Module):
    """Has a buffer that counts its calls."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.calls += 1
        return nn.functional.cross_entropy(output, target)


def test_measuring_puts_counters_and_gradients_back() -> None:
    """Attributes of layers, buffers of the loss, gradients that the user has not used yet."""
    counter, loss = odd_models.Counter(), _CountingLoss()
    model = nn.Sequential(nn.Linear(16, 6), counter, nn.Linear(6, 16))
    task = replace(perceptrons("adamw"), model=model, loss=loss)
    gradient = counter.linear.weight.grad = torch.ones(6, 6)
    measured_problem(task, MachineLimits(10**9, 10**9, 10**9))
    assert (counter.calls, loss.calls.item()) == (0, 0)
    assert counter.linear.weight.grad is gradient
    assert torch.equal(gradient, torch.ones(6, 6))


class _Graph(nn.Module):
    """Mixes rows by a sparse matrix."""

    adjacency: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(8).to_sparse())

    def forward(self, value: Tensor) -> Tensor:
        return torch.sparse.mm(self.adjacency, value)


def test_sparse_buffers_are_counted_by_their_parts() -> None:
    """Of indices and values."""
    model = nn.Sequential(nn.Linear(16, 16), _Graph(), nn.Linear(16, 16))
    task = replace(perceptrons("sgd"), model=model)
    problem = measured_problem(task, MachineLimits(10**9, 10**9, 10**9))
    assert problem.input_bytes == 8 * 16 * 4 + 8 * 8 + 8 * (2 * 8 + 4)


def test_a_gradient_of_before_is_not_added(plan: StatePlan) -> None:
    """As a loop that calls zero_grad first."""

    def make() -> Task:
        task = perceptrons("adamw")
        assert isinstance(task.model, nn.Module)
        for parameter in task.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        return task

    check_bits(make, plan, 2)


class _Average(nn.Module):
    """Subtracts a moving average of what it saw, which is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(16)

    def forward(self, value: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(0.1 * value.detach().mean(0))
        return torch.tanh(value - self.mean)


class _Replaced(nn.Module):
    """The same with a tensor that another one replaces each time."""

    def __init__(self, *, buffer: bool) -> None:
        super().__init__()
        self.mean: Tensor
        if buffer:
            self.register_buffer("mean", torch.zeros(16))
        else:
            self.mean = torch.zeros(16)

    def forward(self, value: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * value.detach().mean(0)
        return torch.tanh(value - self.mean)


@pytest.mark.parametrize(
    "average", [_Average, partial(_Replaced, buffer=True), partial(_Replaced, buffer=False)]
)
def test_a_layer_whose_tensors_move_does_not_run_again(average: Callable[[], nn.Module]) -> None:
    """Also such as are neither parameters nor buffers."""
    same = perceptrons("sgd")
    assert isinstance(same.model, nn.Sequential)
    model = nn.Sequential(
        same.model[0], nn.Sequential(average(), nn.Linear(16, 16)), same.model[1]
    )
    problem = measured_problem(replace(same, model=model), MachineLimits(10**9, 10**9, 10**9))
    offered = [{option.name for option in block.options} for block in problem.blocks]
    assert ["recompute" in each for each in offered] == [True, False, True]


def _by_identity() -> Task:
    task = perceptrons("adamw")
    assert isinstance(task.model, nn.Module)
    biases = {each for name, each in task.model.named_parameters() if name.endswith("bias")}

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [
            {"params": [], "weight_decay": 0.5},
            {"params": [], "lr": 0.1},
        ]
        for each in parameters:
            groups[each in biases]["params"].append(each)
        return torch.optim.AdamW(groups, lr=1e-2)

    return replace(task, optimizer=optimizer)


def test_groups_may_tell_parameters_apart_by_identity(plan: StatePlan) -> None:
    """Also those of which the host updates a copy."""
    check_bits(_by_identity, plan, 3)


def _adagrad() -> Task:
    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(parameters, lr=0.05, initial_accumulator_value=0.1)

    return replace(perceptrons("sgd"), optimizer=optimizer)


def test_states_that_an_optimizer_makes_at_once_are_its_states() -> None:
    """On both sides, as are those of a first step."""
    made = planned(_adagrad(), 0.7, 6_016_481, 16_418_211)
    assert {"host", "offload"} <= _features(made)
    check_against_plain(_adagrad, made)


def test_a_plan_of_another_optimizer_is_refused(plan: StatePlan) -> None:
    """Its states have another size."""
    with pytest.raises(InputError, match="2 states per value, got a task whose optimizer has 1"):
        StateTraining(perceptrons("momentum"), plan)


def _momentum_of_matrices(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    given = list(parameters)
    groups = [
        {"params": [each for each in given if each.ndim > 1], "momentum": 0.9},
        {"params": [each for each in given if each.ndim < 2]},
    ]
    return torch.optim.SGD(groups, lr=0.1)


def test_first_weights_are_the_tasks(plan: StatePlan) -> None:
    """Of its source, as in a pipeline."""
    task = perceptrons("adamw")
    assert isinstance(task.model, nn.Module)
    values = {name: torch.full_like(each, 0.125) for name, each in task.model.state_dict().items()}
    with StateTraining(replace(task, weights=values.__getitem__), plan):
        pass
    assert all(torch.all(each == 0.125) for each in task.model.parameters())


def _with_data(bad: Callable[[int, Tensor], Tensor]) -> Task:
    task = perceptrons("adamw")

    def data(number: int) -> Any:
        source, target = task.data(number)
        return source, bad(number, target)

    return replace(task, data=data)


def test_a_step_that_fails_leaves_no_thread_and_a_whole_model(plan: StatePlan) -> None:
    """The lanes beside the device end with the training; nothing stays without bytes."""
    task, plain = _with_data(lambda number, target: target + 100 * number), perceptrons("adamw")
    training = StateTraining(task, plan)
    torch.manual_seed(1)
    training.step(0)
    with pytest.raises(IndexError) as failed, training:
        training.step(1)
    assert "step 1 has not ended" in failed.value.__notes__[0]
    names = [each.name for each in threading.enumerate()]
    assert not [name for name in names if name.startswith(("pipeplan-host", "pipeplan-back"))]
    with pytest.raises(InputError, match="a step behind its end"):
        training.step(2)
    torch.manual_seed(1)
    train_plainly(plain, 1)
    # The failure is in the forward of the last block: no update of that step has run.
    _check_same_weights(task, plain)
    states = [state for each in training.optimizer_states().values() for state in each.values()]
    assert all(each.untyped_storage().nbytes() for each in states)


def test_a_second_step_behind_one_that_failed_is_refused(plan: StatePlan) -> None:
    """What it had begun cannot go on."""
    with StateTraining(_with_data(lambda number, target: target + 100), plan) as training:
        with pytest.raises(IndexError):
            training.step(0)
        with pytest.raises(InputError, match="behind step 0, which failed"):
            training.step(1)


def test_an_error_between_steps_keeps_what_was_trained(plan: StatePlan) -> None:
    """Also one of the data: the step has not begun."""

    def bad(number: int, target: Tensor) -> Tensor:
        if number == 2:
            raise KeyboardInterrupt
        return target

    task, plain = _with_data(bad), perceptrons("adamw")
    torch.manual_seed(1)
    training = StateTraining(task, plan)
    for number in range(2):
        training.step(number)
    with pytest.raises(KeyboardInterrupt), training:
        training.step(2)
    torch.manual_seed(1)
    train_plainly(plain, 2)
    _check_same_weights(task, plain)


def test_optimizer_states_before_the_end_are_refused(plan: StatePlan) -> None:
    """They wait on the host."""
    training = StateTraining(perceptrons("adamw"), plan)
    with training, pytest.raises(InputError, match="optimizer_states before its end"):
        training.optimizer_states()


def _check_same_weights(task: Task, plain: Task) -> None:
    assert isinstance(task.model, nn.Module)
    assert isinstance(plain.model, nn.Module)
    expected = plain.model.state_dict()
    assert all(torch.equal(value, expected[n]) for n, value in task.model.state_dict().items())


WORDS = nn.Sequential(nn.Embedding(24, 16, sparse=True), nn.Linear(16, 16))


def _words(_: int) -> tuple[Tensor, Tensor]:
    return torch.arange(8), torch.arange(8)


TAUGHT = nn.Sequential(odd_models.Teacher(), nn.Linear(6, 3))
DRAWING = nn.Sequential(odd_models.LayerDrop(), nn.Linear(6, 3))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clip_norm": 1.0}, "clip_norm: got one"),
        ({"optimizer": lambda p: torch.optim.Adafactor(p)}, "need that shape"),
        ({"optimizer": _momentum_of_matrices}, "momentum_buffer.* of 0.weight and .* of 0.bias"),
        ({"master_weights": True}, "master_weights"),
        ({"model": WORDS, "data": _words}, "0.weight: got a gradient of layout.*sparse=True"),
        ({"model": TAUGHT, "data": pipelines.data}, "parameter 0.teacher.weight: its layer's"),
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
