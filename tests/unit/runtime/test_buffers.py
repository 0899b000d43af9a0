"""Layers that change their buffers, computed again: the same bits as one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import weight_norm
from torch.nn.utils.parametrizations import spectral_norm

from pipeplan.errors import InputError, RankError
from pipeplan.plan import Plan, Remat, Semantics
from pipeplan.runtime.stages.module_buffers import ModuleBuffers
from pipeplan.testing import reference
from tests import grids, pipelines

AGAIN = ((1, 1), (3, 3), (5, 6))


class Own(nn.Module):
    """A linear layer with a buffer `mean`, which what is derived from it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("mask", torch.ones(6))


class Replaced(Own):
    """Puts another tensor in its place, and reads it."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.linear(x) - self.mean * self.mask


class Counted(Own):
    """Puts another tensor in its place, and does not read it."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean + x.detach().mean(0)
        return self.linear(x) * self.mask


class Written(Own):
    """Writes to it where autograd does not look."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean.data.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.linear(x) - self.mean.clone()


class Late(Own):
    """Changes it from the third forward on only."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2:
            self.mean.add_(1)
        return self.linear(x) - self.mean.clone()


class Reverse(torch.autograd.Function):
    """The gradient the other way round."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradients[0], None


class Reversed(Own):
    """Reads it in its backward only."""

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean + 1
        return Reverse.apply(self.linear(x), self.mean)  # type: ignore[no-untyped-call]


class Warming(Own):
    """Takes another branch once an integer is large enough."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * (2 if self.calls > 5 else 1)


class Remembered(Own):
    """Reads what it has put into a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        made = self.linear(x) - (0.0 if self.memory is None else self.memory.detach())
        self.memory = made.mean(0)
        return made


class Averaged(Own):
    """Works in place on a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.moving = torch.zeros(6)

    def forward(self, x: Tensor) -> Tensor:
        self.moving.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.linear(x) - self.moving.clone()


class Teacher(Own):
    """Has a frozen copy of its weight, which follows that."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Parameter(torch.zeros(6, 6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.slow.data.mul_(0.9).add_(self.linear.weight.detach(), alpha=0.1)
        return self.linear(x) + x @ self.slow.clone()


def layers(make: Callable[[], nn.Module]) -> list[nn.Module]:
    """Eight layers, three of them `make`, with dropout and statistics among them."""
    return [
        nn.Linear(6, 6),
        make(),
        nn.Dropout(0.1),
        make(),
        nn.Tanh(),
        make(),
        nn.BatchNorm1d(6),
        nn.Linear(6, 3),
    ]


def plan(semantics: Semantics, cuts: Sequence[int], gpus: Sequence[int]) -> Plan:
    """One in which `AGAIN` is computed again."""
    kept = pipelines.plan_of(cuts, gpus, semantics, microbatches=6)
    stages = []
    for stage in kept.stages:
        runs = tuple(run for run in AGAIN if stage.first <= run[0] and run[1] <= stage.last)
        stages.append(stage.model_copy(update={"remat": Remat(recompute=runs)} if runs else {}))
    return kept.model_copy(update={"stages": tuple(stages)})


def trained(planned: Plan, make: Callable[[], nn.Module]) -> pipelines.Outcome:
    """Three steps of it."""
    torch.manual_seed(7)
    split, task = pipelines.split_by_hand(layers(make), "adamw")
    return pipelines.train(planned, pipelines.pattern_of(planned, period=3), split, task, 3)


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "replaced and read": Replaced,
    "replaced": Counted,
    "written through data": Written,
    "read by the backward": Reversed,
    "a branch of an integer": Warming,
    "an attribute": Remembered,
    "an attribute in place": Averaged,
    "spectral norm": lambda: spectral_norm(nn.Linear(6, 6)),
}


@grids.each_pair(make=MAKERS, shape=[([], [0]), ([2, 5], [0, 1, 0])], semantics=["flush", "2bw"])
def test_buffers_change_once_and_are_seen_as_they_were(
    make: Callable[[], nn.Module],
    shape: tuple[Sequence[int], Sequence[int]],
    semantics: Semantics,
) -> None:
    """Losses, weights and buffers equal one process, with several micro-batches in flight."""
    outcome = trained(plan(semantics, *shape), make)
    torch.manual_seed(7)
    split, task = pipelines.split_by_hand(layers(make), "adamw")
    expected = reference.train(semantics, split, task, 3, 6, 3)
    assert outcome.losses == expected.losses
    assert outcome.weights.keys() >= expected.weights.keys()
    for name, value in expected.weights.items():
        assert torch.equal(outcome.weights[name], value), name


def test_a_buffer_that_changes_later_is_refused() -> None:
    """The value before is gone: no wrong gradient, but its name."""
    with pytest.raises((InputError, RankError), match="Late: changes its buffer 'mean' in some"):
        trained(plan("2bw", [], [0]), Late)


def test_a_frozen_parameter_that_moves_is_refused() -> None:
    """No copy of it is kept, as most never move: the message has its name."""
    with pytest.raises(
        (InputError, RankError), match="Teacher: changes its parameter 'slow', whi"
    ):
        trained(plan("flush", [], [0]), Teacher)


def test_what_torch_derives_of_weights_is_not_kept() -> None:
    """Such an attribute is another tensor in each forward, made of parameters alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        layer = weight_norm(nn.Linear(6, 6))
    buffers = ModuleBuffers([layer], lambda made: [made[0](torch.ones(5, 6))])
    assert not buffers.before()


def test_statistics_are_not_kept() -> None:
    """Of what a layer writes and does not read nothing waits for the backward."""
    layer, rows = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)), torch.randn(5, 6)
    buffers = ModuleBuffers([layer], lambda made: [made[0](rows)])
    assert not layer[1].num_batches_tracked
    before = buffers.before()
    layer(rows)
    assert buffers.kept(before) == []
    assert [value.copy for value in before] == [None, None, None]
