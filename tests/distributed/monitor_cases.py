"""Three ranks whose main threads sleep, as in a wait inside of CUDA; prints what lookouts see.

`python monitor_cases.py leave|kill|fail`: all leave together after more than the group's timeout,
rank 2 is killed, rank 2 says that it failed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch.distributed import FileStore
from torch.distributed.distributed_c10d import PrefixStore

sys.path.insert(0, str(Path(__file__).parents[2]))

from pipeplan.runtime.transport import peer_monitor
from tests.forked import run_ranks

RANKS, ENOUGH_S = 3, 10.0
CASES = ("leave", "kill", "fail")


def work(rank: int, number: int, store: str) -> None:
    """One rank."""
    peer_monitor.PATIENCE_S = 0.5
    case = CASES[number]
    stuck = threading.Event()
    patience = timedelta(seconds=1)
    dist.init_process_group(
        "gloo", store=FileStore(store, RANKS), rank=rank, world_size=RANKS, timeout=patience
    )
    group = dist.group.WORLD
    assert group is not None
    looking = peer_monitor.PeerMonitor(group, PrefixStore("lookout", group.get_group_store()))
    looking.if_stuck(lambda _: stuck.set())
    if case == "leave":
        time.sleep(2 * patience.total_seconds())
        dist.barrier()
        looking.close()
        assert not looking.gone()
        assert not stuck.is_set()
        dist.destroy_process_group()
        return
    if rank == 2:
        if case == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        looking.tell("rank 2 of all has failed")
    assert stuck.wait(ENOUGH_S), "nobody ended this process"
    said = f"{case}: rank {rank} hears: {looking.gone()}\n"
    os.write(sys.stdout.fileno(), said.encode())  # whole lines: the ranks share one pipe
    time.sleep(1)  # until all have heard
    os._exit(0)


def main() -> None:
    """The case that is asked for."""
    case = sys.argv[1]
    run_ranks(work, RANKS, CASES.index(case), also_fine=(-signal.SIGKILL,))
    print("over")


if __name__ == "__main__":
    main()
