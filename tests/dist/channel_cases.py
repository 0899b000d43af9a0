"""Ranks that exchange messages over one group per directed boundary, as under NCCL, without tags.

Forked ranks train with gloo groups in NCCL's place. Prints a line per plan: `exact` where losses
and weights equal the reference bit for bit.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import FileStore, ProcessGroup

sys.path.insert(0, str(Path(__file__).parents[2]))

from pipeplan.plan import Plan
from pipeplan.runtime.channels import channels
from pipeplan.runtime.nccl import ChannelTransport
from pipeplan.runtime.ranks import Ranks
from tests import pipelines
from tests.dist.gloo_cases import same
from tests.forked import run_ranks

RANKS = 4
SHAPES = (([1, 3, 4, 5, 7], [0, 1, 2, 0, 1, 3]), ([2, 4, 6], [0, 1, 2, 3]))


def cases() -> list[Plan]:
    """Two boundaries from rank 0 to rank 1 and one of three tensors; a straight pipeline."""
    return [
        pipelines.plan_of(*shape, semantics, microbatches=6)
        for shape in SHAPES
        for semantics in ("flush", "2bw")
    ]


class Counting(ChannelTransport):
    """Counts what takes a channel."""

    taken = 0

    def _channel(self, tensor: Tensor, source: int, target: int, tag: int) -> ProcessGroup | None:
        found = super()._channel(tensor, source, target, tag)
        self.taken += found is not None
        return found


def work(rank: int, number: int, store: str) -> None:
    """One rank of one case; rank 0 compares and prints."""
    torch.set_num_threads(1)
    plan = cases()[number]
    made = channels(plan.stages, pipelines.toy()[0].boundaries, RANKS)
    ranks = Ranks.started(FileStore(store, RANKS), rank, RANKS, timedelta(seconds=60))
    cpu = torch.device("cpu")
    transport = Counting(ranks, made, cpu, backend="gloo", carries=lambda _: True)
    exact = same(plan, pipelines.toy, transport)
    ends = sum(rank in (each.source, each.target) for each in made)
    assert transport.taken > 10 * ends, "messages must take their channels"
    if rank == 0:
        print(
            f"{plan.semantics} {len(plan.stages)}: {'exact' if exact else 'differs'}", flush=True
        )
    transport.close()


def main() -> None:
    """All cases, one after the other."""
    for number in range(len(cases())):
        run_ranks(work, RANKS, number)


if __name__ == "__main__":
    main()
