"""How far a process may be ahead of its GPU, with a made-up GPU: it never waits inside of CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeplan.errors import RankError
from pipeplan.program import Action, ActionKind
from pipeplan.runtime import build as building
from pipeplan.runtime.supervision.run_ahead import COMPUTES, RunAhead
from pipeplan.runtime.transport.base import PeerLostError
from pipeplan.testing import reference
from tests import pipelines

F = ActionKind.F


class Gpu:
    """Does nothing before it is asked; each question about an event gets it one event further."""

    def __init__(self, stops_at: int | None = None) -> None:
        self.given = self.done = self.farthest = 0
        self.stops_at = stops_at

    def mark(self) -> Callable[[], bool]:
        self.given += 1
        self.farthest = max(self.farthest, self.given - self.done)
        return _Mark(self, self.given)  # type: ignore[return-value]


class _Mark:
    def __init__(self, gpu: Gpu, number: int) -> None:
        self.gpu, self.number = gpu, number

    def query(self) -> bool:
        if self.gpu.done < self.number and self.gpu.done != self.gpu.stops_at:
            self.gpu.done += 1
        return self.gpu.done >= self.number


def test_the_process_waits_for_the_oldest_of_many() -> None:
    """Never more computes under way than allowed and the newest; none after `drain`."""
    gpu = Gpu()
    ahead = RunAhead(gpu.mark, computes=3)  # type: ignore[arg-type]
    for number in range(10):
        ahead.computed(Action(F, 0, number))
        assert gpu.given - gpu.done <= 3
    assert gpu.farthest == 4
    assert ahead.missing is None
    ahead.drain()
    assert gpu.done == gpu.given == 10


def test_nobody_waits_without_a_gpu() -> None:
    """On the processor an action is over when it returns."""
    ahead = RunAhead.of(torch.device("cpu"), gone=lambda: "rank 3 is gone")
    for number in range(10):
        ahead.computed(Action(F, 0, number))
    ahead.drain()
    value = torch.ones(2)
    assert ahead.read(value) is value


def test_a_rank_that_is_gone_ends_the_wait() -> None:
    """What the GPU was at is named, not what the process would do next."""
    gpu, gone = Gpu(stops_at=2), [""]
    ahead = RunAhead(gpu.mark, lambda: gone[0], computes=2)  # type: ignore[arg-type]
    for number in range(4):
        ahead.computed(Action(F, 0, number))
    gone[0] = "rank 3 of all is gone"
    with pytest.raises(PeerLostError, match="rank 3 of all is gone"):
        ahead.computed(Action(F, 0, 4))
    assert ahead.missing == Action(F, 0, 2)


def test_a_gpu_that_does_not_go_on_is_missed() -> None:
    """After the timeout, as a message of gloo is."""
    ahead = RunAhead(Gpu(stops_at=0).mark, timeout_ns=10**7, computes=1)  # type: ignore[arg-type]
    ahead.computed(Action(F, 0, 0))
    with pytest.raises(PeerLostError, match="did not go on for 10 ms"):
        ahead.computed(Action(F, 0, 1))


def trained(monkeypatch: pytest.MonkeyPatch, gpus: dict[int, Gpu], gone: str = "") -> Any:
    """A clipped training of four ranks with made-up GPUs."""
    made = iter(gpus.values())
    monkeypatch.setattr(
        building.RunAhead,
        "of",
        lambda *_: RunAhead(next(made).mark, lambda: gone),  # type: ignore[arg-type]
    )
    plan = pipelines.plan_of([2, 4, 6], [0, 1, 2, 3], "2bw", microbatches=6)
    split, task = pipelines.toy()
    task = replace(task, clip_norm=0.5)
    pattern = pipelines.pattern_of(plan, 3)
    return pipelines.train(plan, pattern, split, task, 3), reference.train_2bw(
        *(pipelines.toy()[0], task), 3, 6, seed=3
    )


def test_a_training_that_is_not_far_ahead_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is computed has a mark, and none is left at the end."""
    gpus = {rank: Gpu() for rank in range(4)}
    found, expected = trained(monkeypatch, gpus)
    assert found.losses == expected.losses
    for gpu in gpus.values():
        assert gpu.given == gpu.done == 3 * (6 + 6 + 1)
        assert gpu.farthest == COMPUTES + 1


def test_an_action_of_the_gpu_is_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1's GPU stops at its fourth compute while the list goes on: that one is named."""
    gpus = {rank: Gpu(stops_at=3 if rank == 1 else None) for rank in range(4)}
    with pytest.raises(RankError) as caught:
        trained(monkeypatch, gpus, "rank 0 of all is gone")
    said = str(caught.value)
    assert said.startswith(
        "rank 1: action 1F2 (stage 1, micro-batch 2, peer rank 0) lost its peer"
    )
    assert said.endswith("rank 0 of all is gone")
    assert caught.value.peers == (0,)


def test_norms_are_read_without_waiting_inside_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go through the same wait as everything else."""
    reads: list[Any] = []
    monkeypatch.setattr(RunAhead, "read", lambda _, tensor: (reads.append(tensor), tensor)[1])
    trained(monkeypatch, {rank: Gpu() for rank in range(4)})
    assert len(reads) == 4 * 3, "one transfer per rank and step"
