"""Ranks as forked processes that meet in a file, or as those of torchrun do."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

from pipeplan.launch.rank_store import RankStore

Work = Callable[[int, int, str], None]
"""Of a rank: its number, the case, where the ranks meet."""


def run_ranks(work: Work, ranks: int, case: int, also_fine: Collection[int] = ()) -> None:
    """`work` on each rank; ends this process with 1 if one ends otherwise than well.

    Args:
        work: what each rank does.
        ranks: how many.
        case: given to each.
        also_fine: exit codes besides 0 that are no failure.
    """
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [
            context.Process(target=work, args=(rank, case, store)) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    if any(process.exitcode not in (0, *also_fine) for process in processes):
        sys.exit(1)


def run_joined(work: Callable[[], None], ranks: int) -> None:
    """`work` on each rank, in the environment that torchrun gives its ranks.

    Ends this process with 1 if one ends otherwise than well.
    """
    context = multiprocessing.get_context("fork")
    store = RankStore(context)
    environ = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }

    def one(rank: int) -> None:
        os.environ.update(environ, RANK=str(rank), MASTER_PORT=str(store.port()))
        work()

    processes = [context.Process(target=one, args=(rank,)) for rank in range(ranks)]
    store.start(processes)
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        sys.exit(1)
