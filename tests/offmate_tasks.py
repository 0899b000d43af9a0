"""Small tasks that train with states on the host, and plans whose times are given."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pipeplan.offmate import MachineLimits, StateTraining, StepFigures, measured_problem
from pipeplan.remat.states import StatePlan, StateProblem, plan_states
from pipeplan.task import Task

ROOM = 10**9
MS = 10**6
TIMES = {"keep": 2, "recompute": 3, "offload": 2}
"""Of backwards, over that of a forward."""
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.1),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
}


class _Tied(nn.Module):
    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


def perceptrons(optimizer: str) -> Task:
    """Equal blocks behind a first one."""
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.Linear(16, 40), nn.GELU(), nn.Dropout(0.1), nn.Linear(40, 16))
        for _ in range(5)
    )

    def data(number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        source = torch.randn(8, 16, generator=generator)
        return source, torch.randint(16, (8,), generator=generator)

    return _task(nn.Sequential(nn.Linear(16, 16), *blocks), optimizer, data)


def odd_model(optimizer: str) -> Task:
    """Tied, frozen and buffered layers, views, outputs that their own backwards read."""
    torch.manual_seed(0)
    embedding, frozen = nn.Embedding(24, 16), nn.Linear(16, 16)
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    model = nn.Sequential(
        embedding, nn.Linear(16, 48), nn.ReLU(), nn.Dropout(0.2), nn.Linear(48, 16), frozen,
        nn.Flatten(0, 1), nn.BatchNorm1d(16), nn.Sigmoid(), nn.Linear(16, 16), _Tied(embedding),
    )  # fmt: skip

    def data(number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(number)
        source = torch.randint(24, (6, 4), generator=generator)
        return source, torch.randint(24, (24,), generator=generator)

    return _task(model, optimizer, data)


class _Experts(nn.Module):
    """One of two layers, by the sign of a number."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.experts[int(x[0, 0] > 0)](x))


def experts(optimizer: str) -> Task:
    """A layer of which micro-batches 0, 1 and 4 train one half, and the others the other half."""
    same = perceptrons(optimizer)
    assert isinstance(same.model, nn.Sequential)

    def data(number: int) -> tuple[Tensor, Tensor]:
        source, target = same.data(number)
        source[0, 0] = 1 if number in (2, 3) else -1
        return source, target

    return replace(same, model=nn.Sequential(_Experts(), *same.model), data=data)


def _task(model: nn.Module, optimizer: str, data: Callable[[int], Any]) -> Task:
    loss = nn.functional.cross_entropy
    return Task(model=model, loss=loss, optimizer=OPTIMIZERS[optimizer], data=data)


class _Tables(nn.Module):
    """Reads a table that all share, and makes one of its own at its first call."""

    def __init__(self, shared: list[Tensor]) -> None:
        super().__init__()
        self.shared = shared
        self.own: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.own is None:
            self.own = torch.ones(16, 16).tril()
        return torch.tanh(x @ self.own) * self.shared[0]


def tables(optimizer: str) -> Task:
    """Blocks whose backwards read tensors that are neither parameters nor buffers."""
    same = perceptrons(optimizer)
    assert isinstance(same.model, nn.Sequential)
    first, *blocks = same.model
    shared = [torch.linspace(0.5, 1.5, 128).reshape(8, 16)]
    model = nn.Sequential(first, *(nn.Sequential(each, _Tables(shared)) for each in blocks))
    return replace(same, model=model)


def given_times(problem: StateProblem) -> StateProblem:
    """The problem with times that no machine decides."""
    blocks = [
        replace(
            block,
            options=tuple(
                replace(option, forward_ns=MS, backward_ns=MS * TIMES[option.name])
                for option in block.options
            ),
        )
        for block in problem.blocks
    ]
    return replace(problem, blocks=tuple(blocks))


def planned(
    task: Task, share: float, host_update: int, bandwidth: int, *, duplex: bool = True
) -> StatePlan:
    """A plan within a share of what one takes that has all the room it wants."""
    return _within(_measured(task), share, host_update, bandwidth, duplex=duplex)


@functools.cache
def planned_once(
    make: Callable[[str], Task],
    optimizer: str,
    share: float,
    host_update: int,
    bandwidth: int,
    *,
    duplex: bool = True,
) -> StatePlan:
    """`planned` for a task that is measured once, whatever the machine is."""
    problem = _measured_once(make, optimizer)
    return _within(problem, share, host_update, bandwidth, duplex=duplex)


@functools.cache
def _measured_once(make: Callable[[str], Task], optimizer: str) -> StateProblem:
    return _measured(make(optimizer))


def _measured(task: Task) -> StateProblem:
    return given_times(measured_problem(task, MachineLimits(ROOM, ROOM, MS, 10**8, 0)))


def _within(
    problem: StateProblem, share: float, host_update: int, bandwidth: int, *, duplex: bool
) -> StatePlan:
    machine = replace(
        problem.machine, bandwidth=bandwidth, host_update=host_update or None, duplex=duplex
    )
    most = plan_states(replace(problem, machine=machine), 30).outcome.peak_bytes
    limited = replace(machine, device_bytes=int(most * share))
    return plan_states(replace(problem, machine=limited), 30)


def train_plainly(task: Task, steps: int) -> tuple[list[float], torch.optim.Optimizer]:
    """Losses of a loop without plan, and its optimizer."""
    assert isinstance(task.model, nn.Module)
    assert task.loss is not None
    optimizer = task.optimizer(task.model.parameters())
    losses = []
    for number in range(steps):
        source, target = task.microbatch(number)
        optimizer.zero_grad()
        loss = task.loss(task.model(source), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, optimizer


def check_against_plain(make: Callable[[], Task], plan: StatePlan, steps: int = 4) -> None:
    """Bits of losses, weights, buffers, optimizer states; bytes of device and host."""
    training, figures = check_bits(make, plan, steps)
    # The first step has no gradient of an earlier one, and optimizers make counters in it.
    assert {each.device_peak_bytes for each in figures[1:]} == {plan.outcome.peak_bytes}
    assert {each.host_peak_bytes for each in figures} == {plan.outcome.host_peak_bytes}
    assert training.room.bytes == plan.host_bytes


def check_bits(
    make: Callable[[], Task], plan: StatePlan, steps: int = 6
) -> tuple[StateTraining, list[StepFigures]]:
    """Those of losses, weights, buffers and optimizer states; what was trained, and its steps."""
    task, plain = make(), make()
    torch.manual_seed(1)
    with StateTraining(task, plan) as training:
        figures = [training.step(number) for number in range(steps)]
    torch.manual_seed(1)
    losses, optimizer = train_plainly(plain, steps)
    assert [each.loss for each in figures] == losses
    assert isinstance(task.model, nn.Module)
    assert isinstance(plain.model, nn.Module)
    expected = plain.model.state_dict()
    for name, value in task.model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    states = training.optimizer_states()
    trained = {name: p for name, p in plain.model.named_parameters() if p.requires_grad}
    assert states.keys() == trained.keys()
    for name, parameter in trained.items():
        for key, value in states[name].items():
            assert torch.equal(value, optimizer.state[parameter][key]), (name, key)
    return training, figures


def momentum() -> Task:
    """For the command line."""
    return perceptrons("momentum")
