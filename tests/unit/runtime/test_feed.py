"""Data reach a rank by one call per micro-batch, whatever of it is needed how often."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from pipeplan.livebytes import LiveBytes
from pipeplan.plan import LayerRanges, Plan, Remat
from pipeplan.runtime.data.feed import TaskFeed, Uses
from pipeplan.runtime.instrument import CountedFeed
from pipeplan.split_model import SplitModel
from pipeplan.task import Task
from tests import pipelines

M, STEPS = 4, 3


class _Joins(nn.Module):
    """Reads the model's input behind its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, hidden: Tensor, rows: Tensor) -> Tensor:
        return torch.tanh(self.linear(hidden)) * rows


class _Draws:
    """Data that are new at every call, as a shuffled loader's: only what one call gives fits."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, number: int) -> tuple[Tensor, Tensor]:
        self.calls.append(number)
        return pipelines.data(100 + len(self.calls))


def drawing() -> tuple[SplitModel, Task, _Draws]:
    """Four layers, of which two are fed, with data that are new at every call."""
    torch.manual_seed(0)
    layers = [nn.Linear(6, 6), _Joins(), _Joins(), nn.Linear(6, 3)]
    model, task = pipelines.split_by_hand(layers, "sgd", fed=[1, 2])
    draws = _Draws()
    return model, replace(task, data=draws), draws


def on(gpus: Sequence[int], runs: Sequence[LayerRanges]) -> Plan:
    """Two stages of two layers, with `runs` computed again."""
    plan = pipelines.plan_of([2], gpus, "flush", M, layers=4)
    stages = tuple(
        stage.model_copy(update={"remat": Remat(recompute=run) if run else None})
        for stage, run in zip(plan.stages, runs, strict=True)
    )
    return plan.model_copy(update={"stages": stages})


@pytest.mark.parametrize("runs", [((), ()), (((1, 1),), ((2, 3),))], ids=["kept", "again"])
def test_one_call_per_micro_batch(runs: Sequence[LayerRanges]) -> None:
    """Input, fed layers, target, forwards made twice: bit-equal to one call per micro-batch."""
    model, task, draws = drawing()
    plan = on([0, 0], runs)
    pattern = pipelines.pattern_of(plan, period=4)
    trained = pipelines.train(plan, pattern, model, task, STEPS)
    assert draws.calls == list(range(M * STEPS))
    model, task, _ = drawing()
    task = replace(task, data=lambda number: pipelines.data(101 + number))
    expected = pipelines.train(on([0, 0], [(), ()]), pattern, model, task, STEPS)
    assert trained.losses == expected.losses
    assert all(torch.equal(trained.weights[n], w) for n, w in expected.weights.items())


def test_a_rank_is_told_what_it_needs() -> None:
    """Once per first layer, fed layer and loss; twice where they are computed again."""
    model, _, _ = drawing()
    plan = on([0, 1], (((1, 1),), ((2, 3),)))
    assert Uses.of(plan, model, 0) == Uses(inputs=(3,), targets=0)
    assert Uses.of(plan, model, 1) == Uses(inputs=(2,), targets=2)
    assert Uses.of(plan, model, 0, trains=False) == Uses(inputs=(2,), targets=0)
    assert Uses.of(plan, model, 1, trains=False) == Uses(inputs=(1,), targets=1)


def test_what_waits_is_not_the_stages() -> None:
    """Every use has a tensor of its own; what is handed out counts; in the end none is kept."""
    model, task, draws = drawing()
    live = LiveBytes()
    plain = TaskFeed(task, model, Uses(inputs=(2,), targets=1))
    feed = CountedFeed(plain, live)
    with live:
        (first,) = feed.input(7)
        size = first.nbytes
        assert live.live == size
        first.zero_()
        target = feed.target(7)
        assert live.live == size + target.nbytes
        (second,) = feed.input(7)
        assert live.live == 2 * size + target.nbytes
        del first, second, target
        assert live.live == 0
    assert draws.calls == [7]
    assert not plain._open
    (again,) = plain.input(8)
    again.zero_()
    assert torch.equal(plain.input(8)[0], pipelines.data(102)[0])
    assert torch.equal(plain.target(8), pipelines.data(102)[1])
