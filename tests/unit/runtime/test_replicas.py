"""Averages over replicas: few messages, the sums of one process, nobody waits in a circle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipeplan.runtime.build import build
from pipeplan.runtime.data.feed import TaskFeed, Uses
from pipeplan.runtime.executor import Executor
from pipeplan.runtime.parameters.gradient_buckets import BUCKET_BYTES, buckets
from pipeplan.runtime.parameters.replicas import Replicas, Shard
from pipeplan.runtime.transport.base import Pending, Transport
from pipeplan.runtime.transport.gloo import LocalTransport
from pipeplan.testing.in_process import run_ranks
from tests import pipelines
from tests.unit.runtime.test_updates import Waves

KINDS = (torch.float32, torch.float32, torch.bfloat16, torch.float64)


class Side:
    """One of the replicas of a single rank; messages are sent once they can be received."""

    queues = False

    def __init__(self, transport: Transport) -> None:
        self.replica, self.replicas = transport.rank, transport.size
        self._transport = transport
        self.sent: list[int] = []

    def send_across(self, tensor: Tensor, replica: int) -> Pending:
        assert abs(replica - self.replica) == 1, "only neighbours have a channel"
        self.sent.append(tensor.nbytes)
        return self._transport.send(tensor, replica, 0)

    def receive_across(self, tensor: Tensor, replica: int) -> Pending:
        assert abs(replica - self.replica) == 1
        return self._transport.receive(tensor, replica, 0)


def gradients(replica: int, stage: int) -> list[Tensor]:
    """Of many types and layouts, an empty one among them."""
    generator = torch.Generator().manual_seed(100 * replica + stage)
    shapes = [(7, 5), (3,), (1, 1, 2, 4), (), (0, 3), (30,), (2, 3, 4, 5)]
    made = [torch.randn(shape, generator=generator) * 1e3 for shape in shapes]
    typed = [each.to(KINDS[number % 4]) for number, each in enumerate(made)]
    typed[0] = typed[0].t()
    typed[-1] = typed[-1].to(memory_format=torch.channels_last)
    return typed


def mean(parts: Sequence[Tensor]) -> Tensor:
    """As one process adds up replicas in their order."""
    total = parts[0].clone()
    for part in parts[1:]:
        total = total + part
    return total / len(parts)


@pytest.mark.parametrize("size", [8, 40, 64, BUCKET_BYTES])
@pytest.mark.parametrize("replicas", [2, 3, 5])
def test_averages_of_stages_that_end_one_after_the_other(replicas: int, size: int) -> None:
    """Begun stage by stage, settled twice: bit-equal, though every send waits for its receive."""

    def work(transport: Transport) -> list[list[Tensor]]:
        averages = Replicas(Side(transport), size)  # type: ignore[arg-type]
        own = [gradients(transport.rank, stage) for stage in range(4)]
        averages.begin(own[2])
        averages.begin(own[1])
        averages.begin([])
        averages.begin(own[0])
        averages.settle()
        averages.average(own[3])
        return own

    everybody = run_ranks(replicas, work)
    for stage in range(4):
        for number in range(len(everybody[0][stage])):
            expected = mean([gradients(each, stage)[number] for each in range(replicas)])
            for told in everybody:
                assert torch.equal(told[stage][number], expected)


def test_few_messages() -> None:
    """As many as bytes need, not one per parameter; the last replica sends to its neighbour."""

    def work(transport: Transport) -> list[int]:
        side = Side(transport)
        averages = Replicas(side, 400)  # type: ignore[arg-type]
        averages.average([torch.ones(10) for _ in range(25)])
        return side.sent

    assert run_ranks(3, work) == [[400, 400, 200], [400, 400, 200] * 2, [400, 400, 200]]


def test_the_first_replica_sends_before_anybody_settles() -> None:
    """What needs no answer travels beside the backwards that follow; few at a time have memory."""

    def work(transport: Transport) -> list[int]:
        side = Side(transport)
        averages = Replicas(side, 40)  # type: ignore[arg-type]
        averages.begin([torch.ones(10) for _ in range(5)])
        before = list(side.sent)
        averages.settle()
        return before

    assert run_ranks(3, work) == [[40, 40], [], []]


def test_buckets_hold_one_type_and_so_many_bytes() -> None:
    """In order; a large gradient is cut, views change what they are of."""
    made = [torch.zeros(5), torch.zeros(25), torch.zeros(3, dtype=torch.float64)]
    found = buckets(made, 40)
    assert [[part.nbytes for part in each.parts] for each in found] == [
        [20],
        [40],
        [40],
        [20],
        [24],
    ]
    for each in found:
        each.put(each.gathered() + 1)
    assert all(bool((each == 1).all()) for each in made)
    assert buckets([]) == []


class Told:
    """Averages nothing; writes down when it is asked."""

    def __init__(self, told: list[str]) -> None:
        self.told = told

    def begin(self, gradients: Sequence[Tensor]) -> None:
        self.told.append("begin")

    def settle(self) -> None:
        self.told.append("settle")


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_averages_overlap_with_the_drain(
    semantics: Any, clip: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under flush a stage's begins behind its last backward; all are settled at the updates."""
    plan = pipelines.plan_of([2, 4, 6], [0, 1, 0, 1], semantics, microbatches=4)
    split, task = pipelines.toy()
    told: dict[int, list[str]] = {0: [], 1: []}
    execute = Executor._execute

    def noting(self: Executor, action: Any) -> None:
        if action.microbatch is None or str(action.kind) == "B":
            told[self._transport.rank].append(f"{action.kind}{action.stage}")
        execute(self, action)

    monkeypatch.setattr(Executor, "_execute", noting)

    def work(transport: Transport) -> None:
        build(
            plan,
            pipelines.pattern_of(plan, 3),
            split,
            replace(task, clip_norm=clip),
            TaskFeed(task, split, Uses.of(plan, split, transport.rank)),
            transport,
            pipelines.Listener(),
            seed=0,
            replicas=Told(told[transport.rank]),  # type: ignore[arg-type]
        ).executor.run(0, 2)

    run_ranks(2, work)
    for rank, (early, late) in enumerate([(2, 0), (3, 1)]):
        if semantics == "flush":
            first = told[rank][: told[rank].index("settle") + 1]
            behind = first[first.index("begin") :]
            assert f"B{early}" not in behind
            assert behind.count("begin") == 2
            assert f"B{late}" in behind, "a backward that the average travels beside"
            assert behind[-3:] == [f"OPT{early}", f"OPT{late}", "settle"]
            assert told[rank][len(first) :] == first, "the second step is like the first"
        else:
            words = [word for word in told[rank] if not word.startswith("B")]
            assert words == [f"OPT{early}", "begin", "settle", f"OPT{late}", "begin", "settle"] * 2


def test_complex_parameters() -> None:
    """A stage whose first parameter is complex tells which gradients have come, as others do."""

    def work(transport: Transport) -> list[list[Tensor]]:
        torch.manual_seed(5)
        split, task = pipelines.split_by_hand([Waves(), nn.Linear(6, 6)], "sgd")
        plan = pipelines.plan_of([], [0], "flush", microbatches=2, layers=2)
        number = Shard(2, transport.rank, 2).number
        worker = build(
            plan,
            pipelines.pattern_of(plan, 3),
            split,
            task,
            TaskFeed(task, split, Uses.of(plan, split, 0), number),
            LocalTransport(),
            pipelines.Listener(),
            seed=0,
            replicas=Replicas(Side(transport)),  # type: ignore[arg-type]
        )
        before = [each.detach().clone() for each in split.layers[0].parameters()]
        worker.executor.run(0, 1)
        return [before, list(pipelines.weights_of(worker).values())]

    (before, first), (_, second) = run_ranks(2, work)
    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0], before[0])
