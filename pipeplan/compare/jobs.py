"""Independent jobs one after the other, or several at once in other processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Generic, TypeVar

from pipeplan.errors import PipeplanError

Result = TypeVar("Result")
Tell = Callable[[float, str], None]
"""(share of the work done, what was done last or comes next)."""


@dataclass(frozen=True, slots=True)
class Job(Generic[Result]):
    """What is done and how; `call` and what it returns are pickled to cross processes."""

    what: str
    call: Callable[[], Result]


def run(jobs: Sequence[Job[Result]], processes: int, tell: Tell) -> list[Result]:
    """The results of `jobs`, in their order.

    Args:
        jobs: begun in this order, so that the longest should come first.
        processes: how many at once; 1 runs them here.
        tell: hears what comes next (one at a time) or is done (several).

    Raises:
        PipeplanError: if a process was killed.
    """
    if processes <= 1 or len(jobs) <= 1:
        return list(_one_by_one(jobs, tell))
    # Not forked: a solver or progress bar may have threads here.
    context = multiprocessing.get_context("spawn")
    count = min(processes, len(jobs))
    with ProcessPoolExecutor(count, context, initializer=_end_with_parent) as pool:
        futures = {pool.submit(job.call): job for job in jobs}
        tell(0.0, jobs[0].what)
        try:
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                tell(done / len(jobs), f"done: {futures[future].what}")
        except BrokenProcessPool:
            raise PipeplanError(
                "compare: one of the processes was killed, perhaps for want of memory."
                " Run fewer at once (--jobs 1)."
            ) from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        return [future.result() for future in futures]


def _one_by_one(jobs: Sequence[Job[Result]], tell: Tell) -> Iterator[Result]:
    for index, job in enumerate(jobs):
        tell(index / len(jobs), job.what)
        yield job.call()


def _end_with_parent() -> None:
    """No work is left behind: Ctrl-C ends a process without a word, so does its parent's end."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
