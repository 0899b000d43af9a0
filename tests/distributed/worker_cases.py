"""A process with workers that load ahead, whose group gets the signals that stop a rank.

`python worker_cases.py goes-on fork` prints how many micro-batches came behind them; so does
`of-a-file`, where the data set is a task file's. `is-killed` prints the process ids of its workers
and kills itself. Workers are forked, or start otherwise.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from pipeplan.batching import batches
from pipeplan.task import load
from tests import loader_task

WORKERS, COUNT = 2, 20
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def main(does: str, starts: str) -> int:
    """Signals its own group, as a launcher does; the rank has handlers of its own."""
    noted: list[int] = []
    for number in SIGNALS:
        signal.signal(number, lambda number, _: noted.append(number))
    data = batches(loader_task.loader(WORKERS, starts))
    if does == "of-a-file":
        multiprocessing.set_start_method(starts, force=True)
        data = load(f"{loader_task.__file__}:task").data  # type: ignore[assignment]
    coming = data.ahead(itertools.count())
    assert coming is not None
    for number in SIGNALS:  # also while workers begin, and again while they load
        os.killpg(0, number)
    found: list[Any] = [next(coming)]
    for number in SIGNALS:
        os.killpg(0, number)
    found += itertools.islice(coming, COUNT - 1)
    assert sorted({*noted}) == sorted(SIGNALS)
    assert all((rows[0] == data(number)[0]).all() for number, rows in enumerate(found))
    workers = multiprocessing.active_children()
    if does != "of-a-file":  # there as Python starts processes, here as the loader says
        assert all(worker._start_method == starts for worker in workers)  # type: ignore[attr-defined]
    pids = [worker.pid for worker in workers]
    if does == "is-killed":
        print(*pids, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    print(len(found), len(pids), flush=True)
    return 0  # with `coming` alive: Python's end ends the workers


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
