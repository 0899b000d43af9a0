"""Virtual clocks over gloo: for each size, processes are forked and run random plans dry.

Prints `exact N of M` where in N of M plans every action of every rank ended when the simulator
says. One process imports torch and forks, so that 16 ranks start in seconds.
"""

from __future__ import annotations

import functools
import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import FileStore

sys.path.insert(0, str(Path(__file__).parents[2]))

from pipeplan import lowering
from pipeplan.plan import Plan
from pipeplan.runtime.transport.gloo import GlooTransport
from pipeplan.runtime.transport.rank_grid import RankGrid
from pipeplan.testing import plans
from tests import dry_runs
from tests.forked import run_ranks

SIZES = {2: 2, 4: 2, 8: 2, 16: 2}
"""Ranks -> plans."""
STEPS = 2


@functools.cache
def cases(ranks: int) -> list[Plan]:
    """Random plans for `ranks` GPUs."""
    return [
        plans.random_plan(200 + seed, gpus=ranks, layers=ranks + 3) for seed in range(SIZES[ranks])
    ]


def work(rank: int, ranks: int, store: str) -> None:
    """One rank of one size; rank 0 compares and prints."""
    torch.set_num_threads(1)
    joined = RankGrid.started(FileStore(store, ranks), rank, ranks, timedelta(seconds=60))
    transport = GlooTransport(joined)
    exact = 0
    for plan in cases(ranks):
        pattern = lowering.lower(plan)
        told = transport.gather(dry_runs.ran(plan, pattern, STEPS, transport))
        exact += rank == 0 and told == dry_runs.simulated(plan, pattern, STEPS)
    if rank == 0:
        print(f"{ranks} ranks: exact {exact} of {len(cases(ranks))}", flush=True)
    transport.close()


def main() -> None:
    """All sizes, one after the other."""
    for ranks in SIZES:
        cases(ranks)  # once, not by each rank
        run_ranks(work, ranks, ranks)


if __name__ == "__main__":
    main()
