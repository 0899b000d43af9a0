"""`python -m pipeplan.launch.local`: launches on this machine, one after the other.

Each line of stdin is a launch, `{"ranks": P, "words": [..], "log": FILE, "fresh": false}`: the
flags of `pipeplan.launch`, where its ranks' output goes, and whether each rank is a new process.
Its answer is a line of stdout, the exit codes of the ranks; a negative one is a signal. The end of
stdin ends the launch under way and the process.

Ranks that are not fresh are forked from this process, so that torch is imported once and not by
each rank of each launch, which takes seconds. Whoever forks must not have begun to compute; this
process only imports. Between launches everything is as new. Forked ranks share what the kernel
knows of their memory: a model that trains there takes 2 % longer than in ranks of torchrun, where
blocks of its tensors come and go. What is timed while it trains has fresh ones.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from multiprocessing import connection
from multiprocessing.context import BaseContext, ForkProcess, SpawnProcess
from multiprocessing.process import BaseProcess

import torch._dynamo  # what a rank imports late
import torch.distributed.checkpoint.filesystem  # noqa: F401

from pipeplan import interrupts
from pipeplan.launch import dry_run, train  # noqa: F401
from pipeplan.launch.__main__ import main as launch
from pipeplan.launch.rank_store import RankStore

_PART_S = 10.0
"""How long ranks may go on once one has failed: they say who it was, and save nothing."""


def serve() -> int:
    """Answer launches until stdin ends."""
    for line in sys.stdin:
        asked = json.loads(line)
        codes = run(asked["ranks"], asked["words"], asked["log"], fresh=asked["fresh"])
        print(json.dumps(codes), flush=True)
    return 0


def run(ranks: int, words: Sequence[str], log: str, *, fresh: bool) -> list[int]:
    """The exit codes of one launch's ranks.

    Args:
        ranks: how many.
        words: flags of `pipeplan.launch`.
        log: file of all that they print.
        fresh: whether each is a new process, not forked from this one.
    """
    context: BaseContext = multiprocessing.get_context("spawn" if fresh else "fork")
    store = RankStore(context)
    start: type[BaseProcess] = SpawnProcess if fresh else ForkProcess
    processes = [
        start(target=_rank, args=(rank, ranks, store, words, log)) for rank in range(ranks)
    ]
    store.start(processes)
    _wait(processes)
    return [process.exitcode or 0 for process in processes]


def _wait(processes: Sequence[BaseProcess]) -> None:
    """Return when all have ended: with a failure soon, with the end of stdin at once."""
    patience: float | None = None
    while alive := [process for process in processes if process.exitcode is None]:
        ends = [*(process.sentinel for process in alive), sys.stdin.fileno()]
        over = sys.stdin.fileno() in connection.wait(ends, timeout=1.0)
        if patience is None and any(process.exitcode for process in processes):
            patience = time.monotonic() + _PART_S
        if over or (patience is not None and time.monotonic() > patience):
            for process in alive:
                process.kill()
                process.join()


def _rank(rank: int, ranks: int, store: RankStore, words: Sequence[str], log: str) -> None:
    """What a rank's process runs: `pipeplan.launch` as torchrun starts it."""
    with open(log, "ab") as file, open(os.devnull, "rb") as nothing:
        for number, stream in enumerate((nothing, file, file)):
            os.dup2(stream.fileno(), number)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(store.port()),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    sys.argv[1:] = words
    interrupts.leave(launch())


if __name__ == "__main__":
    sys.exit(serve())
