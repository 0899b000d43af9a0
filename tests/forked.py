"""Ranks as forked processes that meet in a file."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

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
