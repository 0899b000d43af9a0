"""A parameter that no gradient reaches in a step stays as it is, as in a plain loop."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pipeplan.plan import Semantics
from pipeplan.split_model import SplitModel
from pipeplan.task import Task
from tests import pipelines

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


def plain(optimizer: str, steps: int) -> dict[str, Tensor]:
    """A loop that begins each step without gradients."""
    _, task = made(optimizer)
    model = nn.Sequential(*task.model)  # type: ignore[misc]
    steps_of = [task.optimizer(layer.parameters()) for layer in model]
    for step in range(steps):
        model.zero_grad(set_to_none=True)
        for number in range(step * M, (step + 1) * M):
            source, target = data(number)
            cross_entropy(model(source), target).backward()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= M
        for each in steps_of:
            each.step()
    return dict(model.named_parameters())


@pytest.mark.parametrize("optimizer", pipelines.OPTIMIZERS)
@pytest.mark.parametrize("cuts", [[], [1]])
def test_equals_a_loop_without_gradients(optimizer: str, cuts: list[int]) -> None:
    """Neither weight decay nor momentum moves what got no gradient in the step."""
    split, task = made(optimizer)
    plan = pipelines.plan_of(cuts, list(range(len(cuts) + 1)), "flush", M, layers=2)
    outcome = pipelines.train(plan, pipelines.pattern_of(plan, period=2), split, task, 6)
    expected = plain(optimizer, 6)
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
