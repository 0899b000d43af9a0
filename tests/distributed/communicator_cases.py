"""Ranks that exchange messages over one group per channel, as under NCCL, without tags.

Forked ranks train with gloo groups in NCCL's place. Prints a line per case: `exact` where losses
and weights equal the reference bit for bit.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import FileStore

sys.path.insert(0, str(Path(__file__).parents[2]))

from pipeplan.plan import Plan
from pipeplan.runtime.build import build
from pipeplan.runtime.data.feed import TaskFeed, Uses
from pipeplan.runtime.parameters.replicas import Replicas, Shard
from pipeplan.runtime.parameters.tied_parameters import find_ties, untie
from pipeplan.runtime.startup.communicators import communicators
from pipeplan.runtime.transport.nccl import NcclTransport
from pipeplan.runtime.transport.pair_communicator import PairCommunicator
from pipeplan.runtime.transport.rank_grid import RankGrid
from pipeplan.split_model import SplitModel
from pipeplan.task import Task
from pipeplan.testing import reference
from pipeplan.testing.gloo_communicator import gloo
from tests import pipelines
from tests.distributed.gloo_cases import same
from tests.forked import run_ranks

RANKS, STEPS, M = 4, 3, 6


@dataclass(frozen=True)
class Case:
    """A plan, on one replica or several."""

    name: str
    plan: Plan
    make: Callable[[], tuple[SplitModel, Task]] = pipelines.toy
    replicas: int = 1

    @property
    def gpus(self) -> int:
        """Of one replica."""
        return RANKS // self.replicas


def cases() -> list[Case]:
    """Two boundaries from rank 0 to rank 1 and one of three tensors; ties; replicas."""
    found = []
    for semantics in ("flush", "2bw"):
        plan = partial(pipelines.plan_of, semantics=semantics, microbatches=M)
        far = partial(pipelines.tied, clip=False, how="synchronize")
        found += [
            Case(f"{semantics} looped", plan([1, 3, 4, 5, 7], [0, 1, 2, 0, 1, 3])),
            Case(f"{semantics} straight", plan([2, 4, 6], [0, 1, 2, 3])),
            Case(f"{semantics} tied", plan([1, 3, 4], [2, 0, 3, 1], layers=5), far),
            Case(f"{semantics} replicas", plan([2, 4, 6], [0, 1, 0, 1]), replicas=2),
            Case(f"{semantics} four replicas", plan([3], [0, 0]), replicas=4),
        ]
    return found


class Counting(NcclTransport):
    """Counts what takes a channel; all has to."""

    taken = 0

    def _communicator(
        self, tensor: Tensor, source: int, target: int, tag: int
    ) -> PairCommunicator | None:
        found = super()._communicator(tensor, source, target, tag)
        assert found is not None or not tensor.numel(), "messages must take their channels"
        self.taken += 1
        return found


def same_side_by_side(case: Case, transport: NcclTransport) -> bool:
    """Whether replicas equal one process that averages over their micro-batches."""
    split, task = case.make()
    shard = Shard(M, replica=transport.replica, replicas=case.replicas)
    worker = build(
        case.plan,
        pipelines.pattern_of(case.plan, period=3),
        split,
        task,
        TaskFeed(task, split, Uses.of(case.plan, split, transport.rank), shard.number),
        transport,
        pipelines.Listener(),
        seed=3,
        replicas=Replicas(transport, 100),
        shard=shard,
    )
    worker.executor.run(0, STEPS)
    told = transport.gather(pipelines.weights_of(worker))
    replicas = [case.replicas] * STEPS
    trained = reference.train(
        case.plan.semantics, *case.make(), STEPS, M, seed=3, replicas=replicas
    ).weights
    weights = {name: value for part in told for name, value in part.items()}
    return weights.keys() == trained.keys() and all(
        torch.equal(weights[name], value) for name, value in trained.items()
    )


def work(rank: int, _: int, store: str) -> None:
    """One rank of all cases, which meets the others anew in each."""
    torch.set_num_threads(1)
    for number, case in enumerate(cases()):
        run(rank, case, f"{store}-{number}")


def run(rank: int, case: Case, store: str) -> None:
    """One rank of one case; rank 0 compares and prints."""
    split, task = case.make()
    split = untie(split, task.tied)
    ties = find_ties(case.plan.stages, split)
    made = communicators(case.plan.stages, split.boundaries, case.gpus, case.replicas, ties)
    patience = timedelta(seconds=60)
    ranks = RankGrid.started(FileStore(store, RANKS), rank, RANKS, patience, case.replicas)
    cpu = torch.device("cpu")
    transport = Counting(ranks, made, cpu, make=gloo, carries=lambda _: True)
    if case.replicas > 1:
        exact = same_side_by_side(case, transport)
    else:
        exact = same(case.plan, case.make, transport)
    ends = sum(rank in (each.source, each.target) for each in made)
    assert transport.taken > ends, "each channel carries more than its first message"
    if rank == 0:
        print(f"{case.name}: {'exact' if exact else 'differs'}", flush=True)
    transport.close()


def main() -> None:
    """All cases, one after the other."""
    run_ranks(work, RANKS, case=0)


if __name__ == "__main__":
    main()
