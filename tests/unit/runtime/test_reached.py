"""A parameter that no gradient reaches in a step stays as it is, as in a plain loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipeplan.plan import Semantics
from pipeplan.runtime.parameters.tied_parameters import untie
from pipeplan.split_model import SplitModel
from pipeplan.task import Task, Tied
from tests import grids, pipelines

M = 2


class Gate(nn.Module):
    """Its second weight gets no gradient, its third one only from some micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.frozen, self.rare = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, value: Tensor) -> Tensor:
        with torch.no_grad():
            gate = torch.sigmoid(self.frozen(value))
        made = self.linear(value) * gate
        return made + self.rare(value) if value[0, 0] > 1 else made


def data(microbatch: int) -> tuple[Tensor, Tensor]:
    """Rows that open the gate's rare way in every third step."""
    rows, target = pipelines.data(microbatch)
    rows[0, 0] = 9.0 if microbatch // M % 3 == 1 else -9.0
    return rows, target


def made(optimizer: str) -> tuple[SplitModel, Task]:
    """Two layers with always the same weights."""
    torch.manual_seed(7)
    return pipelines.split_by_hand([Gate(), nn.Linear(6, 3)], optimizer, data=data)


def plain(task: Task, steps: int) -> dict[str, Tensor]:
    """A loop that begins each step without gradients."""
    model = nn.Sequential(*task.model)  # type: ignore[misc]
    optimizer = task.optimizer(model.parameters())
    for step in range(steps):
        model.zero_grad(set_to_none=True)
        for number in range(step * M, (step + 1) * M):
            source, target = task.data(number)
            cross_entropy(model(source), target).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= M
        optimizer.step()
    return dict(model.named_parameters())


@pytest.mark.parametrize("optimizer", pipelines.OPTIMIZERS)
@pytest.mark.parametrize("cuts", [[], [1]])
def test_equals_a_loop_without_gradients(optimizer: str, cuts: list[int]) -> None:
    """Neither weight decay nor momentum moves what got no gradient in the step."""
    split, task = made(optimizer)
    plan = pipelines.plan_of(cuts, list(range(len(cuts) + 1)), "flush", M, layers=2)
    outcome = pipelines.train(plan, pipelines.pattern_of(plan, period=2), split, task, 6)
    expected = plain(made(optimizer)[1], 6)
    assert outcome.weights.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(outcome.weights[name], value), name


@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_what_gets_no_gradient_keeps_its_value(semantics: Semantics) -> None:
    """In both modes, though the optimizer decays weights."""
    split, task = made("sgd")
    before = split.layers[0].frozen.weight.detach().clone()  # type: ignore[union-attr]
    plan = pipelines.plan_of([1], [0, 1], semantics, M, layers=2)
    outcome = pipelines.train(plan, pipelines.pattern_of(plan, period=2), split, task, 4)
    assert torch.equal(outcome.weights["0.frozen.weight"], before)
    assert not torch.equal(outcome.weights["0.linear.weight"], before)


class Weighted(nn.Module):
    """Uses a weight that other layers have, too; its gradient comes only where it is `reached`."""

    def __init__(self, weight: nn.Parameter, *, reached: bool) -> None:
        super().__init__()
        self.linear, self.weight, self.reached = nn.Linear(6, 6), weight, reached

    def forward(self, value: Tensor) -> Tensor:
        made = value @ self.weight
        return torch.tanh(self.linear(value)) + (made if self.reached else made.detach())


def shared(reached: tuple[bool, bool], how: Tied) -> tuple[SplitModel, Task]:
    """Four layers, the first and the third of which share a weight."""
    torch.manual_seed(7)
    weight = nn.Parameter(torch.randn(6, 6))
    first, third = (Weighted(weight, reached=each) for each in reached)
    layers = [first, nn.Linear(6, 6), third, nn.Linear(6, 3)]
    split, task = pipelines.split_by_hand(layers, "sgd")
    return split, replace(task, tied=how)


@grids.each_pair(
    reached={"nowhere": (False, False), "first": (True, False), "third": (False, True)},
    shape={
        "one rank": (([1, 2], [0, 0, 0]), "colocate"),
        "copy beside": (([1, 2], [0, 0, 0]), "synchronize"),
        "copy elsewhere": (([2], [0, 1]), "synchronize"),
    },
)
def test_shared_weights_know_whether_any_layer_is_reached(
    reached: tuple[bool, bool], shape: tuple[tuple[list[int], list[int]], Tied]
) -> None:
    """Owner and copies are all updated, or none is: a total of zeros is not told from none."""
    cuts, how = shape
    split, task = shared(reached, how)
    split = untie(split, how)
    plan = pipelines.plan_of(*cuts, "flush", M, layers=4)
    pipelines.train(plan, pipelines.pattern_of(plan, period=2), split, task, 3)
    expected = plain(shared(reached, how)[1], 3)
    for layer, names in zip(split.layers, split.fqns, strict=True):
        for local, parameter in layer.named_parameters():
            assert torch.equal(parameter, expected[names[local]]), names[local]
