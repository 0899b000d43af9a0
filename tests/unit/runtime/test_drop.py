"""A long step dropped in its middle: the state is that of the last finished one, bit for bit."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeplan.plan import Plan, Semantics
from pipeplan.runtime.build import build
from pipeplan.runtime.checkpoint import named_state
from pipeplan.runtime.data.feed import TaskFeed, Uses
from pipeplan.runtime.parameters.buffer_snapshots import BufferSnapshots
from pipeplan.runtime.parameters.tied_parameters import untie
from pipeplan.runtime.supervision import stop_consensus
from pipeplan.runtime.supervision.board import LocalBoard
from pipeplan.runtime.supervision.stop_consensus import BoardConsensus
from pipeplan.runtime.supervision.stop_request import NoRequest
from pipeplan.runtime.transport.base import Transport
from pipeplan.split_model import SplitModel
from pipeplan.task import LossScale, Task
from pipeplan.testing.in_process import run_ranks
from tests import grids, pipelines

STEPS, M = 3, 6
"""So few that the last step is dropped with the one before, whose update it would need."""
MAPS = {
    "one rank": ([3, 5], [0, 0, 0]),
    "looped": ([2, 4, 6], [0, 1, 0, 1]),
    "there and back": ([1, 3, 4, 5, 7], [0, 1, 2, 3, 1, 0]),
}


@pytest.fixture(autouse=True)
def attentive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks look at the board often: they would wait four times as long as they compute."""
    monkeypatch.setattr(stop_consensus, "_LOOK_S", 0.01)


class Asking(BoardConsensus):
    """Asks all ranks to stop at one of its questions, in the middle of a step."""

    question = 0
    count = 0

    def dropped(self, step: int) -> bool:
        """See `Gate`."""
        self.count += 1
        if self.count == self.question:
            self.ask()
        return super().dropped(step)


@dataclass(frozen=True)
class Ended:
    """How a run ended, on all ranks."""

    done: int
    lost: int
    """Steps that were begun for nothing."""
    state: dict[str, Any]
    scales: object
    questions: list[int]
    """Of each rank."""


def run(
    plan: Plan, split: SplitModel, task: Task, steps: int, who: int = -1, question: int = 0
) -> Ended:
    """A run of all ranks, of which `who` asks at its how many-th question; steps are long."""
    board, ranks = LocalBoard(), len(plan.cluster.gpus)
    pattern = pipelines.pattern_of(plan, period=3)
    model = untie(split, task.tied)
    consensuses: list[Asking] = []

    def work(transport: Transport) -> tuple[int, dict[str, Any], object]:
        ends = {"first": 0, "timeout_s": 60, "long_s": 0}
        consensus = Asking(board, transport.rank, ranks, NoRequest(), **ends)  # type: ignore[arg-type]
        consensus.question = question if transport.rank == who else 0
        consensuses.append(consensus)
        feed = TaskFeed(task, model, Uses.of(plan, model, transport.rank))
        listener = pipelines.Listener()
        worker = build(
            plan, pattern, model, task, feed, transport, listener, seed=3, consensus=consensus
        )
        done = worker.executor.run(0, steps)
        state = named_state.state_of(worker.stages.values())
        return done, {k: _copy(v) for k, v in state.items()}, worker.scales(done)

    told = run_ranks(ranks, work)
    for consensus in consensuses:
        consensus.close()
    (done,) = {done for done, _, _ in told}
    (scales,) = {repr(scales) for _, _, scales in told}
    state = {key: value for _, part, _ in told for key, value in part.items()}
    asked = {consensus._rank: consensus.count for consensus in consensuses}
    return Ended(done, consensuses[0].lost, state, scales, [asked[rank] for rank in range(ranks)])


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def plain(optimizer: str = "adamw") -> tuple[SplitModel, Task]:
    """Dropout, batch norm, a skip."""
    return pipelines.toy(optimizer)


def clipped() -> tuple[SplitModel, Task]:
    """Updates wait for all stages."""
    split, task = pipelines.toy()
    return split, replace(task, clip_norm=0.5)


def scaled() -> tuple[SplitModel, Task]:
    """The next scale follows from each step."""
    split, task = pipelines.toy()
    return split, replace(task, loss_scale=LossScale(initial=4.0, interval=2), clip_norm=0.5)


def tied() -> tuple[SplitModel, Task]:
    """Copies of weights whose gradients go to and fro."""
    return pipelines.tied(clip=False, how="synchronize")


def tied_and_clipped() -> tuple[SplitModel, Task]:
    """Both."""
    return pipelines.tied(clip=True, how="synchronize")


Shape = tuple[Sequence[int], Sequence[int]]
TIES = {
    "one rank": ([2], [0, 0]),
    "looped": ([1, 2, 4], [0, 1, 0, 1]),
    "three": ([1, 2, 4], [0, 1, 2, 1]),
}
CASES: dict[str, tuple[Callable[[], tuple[SplitModel, Task]], Shape]] = {
    f"{make.__name__}, {name}": (make, shape)
    for makes, shapes in (((plain, clipped, scaled), MAPS), ((tied, tied_and_clipped), TIES))
    for make in makes
    for name, shape in shapes.items()
}


def same(ended: Ended, expected: Ended) -> None:
    """The state to be saved is the same, bit for bit."""
    assert ended.scales == expected.scales
    assert ended.state.keys() == expected.state.keys()
    for key, value in expected.state.items():
        found = ended.state[key]
        assert torch.equal(found, value) if isinstance(value, Tensor) else found == value, key


@grids.each_value(case=list(CASES), semantics=["flush", "2bw"])
def test_what_is_left_is_the_last_finished_step(case: str, semantics: Semantics) -> None:
    """Whoever asks, wherever it is: weights of all versions, optimizer, buffers, scales."""
    make, (cuts, gpus) = CASES[case]
    split, task = make()
    plan = pipelines.plan_of(cuts, gpus, semantics, M, layers=len(split.layers))
    after = functools.cache(lambda steps: run(plan, make()[0], task, steps))
    askers = itertools.cycle(sorted({gpus[0], gpus[-1], max(gpus)}))
    lost = 0
    for part, who in zip((0.1, 0.4, 0.6, 0.9), askers, strict=False):
        question = int(part * after(STEPS).questions[who])
        ended = run(plan, make()[0], task, STEPS, who, question)
        assert ended.done + ended.lost <= STEPS
        same(ended, after(ended.done))
        lost += ended.lost
    assert lost, "no step was dropped: the test shows nothing"


class Counter(nn.Module):
    """A buffer that another tensor replaces, one of no dimension, one of half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("replaced", torch.ones(2, 3).t())
        self.register_buffer("counted", torch.tensor(0))
        self.register_buffer("small", torch.full((3,), 0.5, dtype=torch.bfloat16))
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        """Changes all of them."""
        self.replaced = self.replaced + 1
        self.counted.add_(1)
        self.small.mul_(2)
        return x


def test_buffers_of_all_kinds_turn_back() -> None:
    """To the step that is asked for; one whose forward has not been is left as it is."""
    layer = Counter()
    past = BufferSnapshots([layer])
    states = []
    for step in range(3):
        past.remember(step, since=step - 1)
        states.append({name: value.clone() for name, value in layer.state_dict().items()})
        layer(torch.ones(1))
        past.remember(step, since=step - 1)
    past.turn_back(3)
    assert layer.counted == 3
    past.turn_back(0)
    assert layer.counted == 3, "long forgotten"
    for step in (2, 1):
        past.turn_back(step)
        state = layer.state_dict()
        assert all(torch.equal(state[name], value) for name, value in states[step].items())
        assert state["replaced"].stride() == states[0]["replaced"].stride() or step


def test_sparse_and_conjugated_buffers_turn_back() -> None:
    """Their numbers do not lie in a row of bytes."""
    layer = nn.Module()
    layer.register_buffer("edges", torch.eye(3).to_sparse())
    layer.register_buffer("waves", torch.tensor([1 + 2j, 3 - 4j]).conj())
    past = BufferSnapshots([layer])
    past.remember(0, since=0)
    layer.edges.mul_(2)
    layer.waves.mul_(2)
    past.turn_back(0)
    assert torch.equal(layer.edges.to_dense(), torch.eye(3))
    assert layer.waves.tolist() == [1 - 2j, 3 + 4j]


def test_ranks_take_the_answer_of_the_slowest() -> None:
    """One with long steps is enough; updated steps are never dropped."""
    board = LocalBoard()
    options = {"first": 0, "timeout_s": 20}
    slow = BoardConsensus(board, 0, 2, NoRequest(), **options, long_s=0.01)  # type: ignore[arg-type]
    quick = BoardConsensus(board, 1, 2, NoRequest(), **options)  # type: ignore[arg-type]
    for consensus in (slow, quick):
        assert consensus.begin_step(0)
        assert consensus.begin_update(0)
        assert consensus.begin_step(1)
    time.sleep(0.02)
    assert quick.begin_update(1)
    assert quick.begin_step(2)
    slow.ask()
    assert not slow.dropped(1), "another rank has updated it"
    assert slow.begin_update(1)
    assert slow.begin_step(2)
    assert slow.dropped(2)
    assert quick.dropped(2)
    assert not quick.begin_update(2)
    assert not slow.begin_step(3)
    assert (slow.kept(9), slow.lost) == (2, 1)
    slow.close()
    quick.close()


def test_who_cannot_go_back_finishes() -> None:
    """A step whose buffers were not copied is as good as updated."""
    consensus = BoardConsensus(LocalBoard(), 0, 1, NoRequest(), first=0, timeout_s=20, long_s=0.0)
    consensus.finish_all()
    assert consensus.begin_step(0)
    assert not consensus.may_drop(0)
    consensus.ask()
    assert not consensus.dropped(0)
    consensus.close()
