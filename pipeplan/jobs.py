"""Independent jobs one after the other, or several at once in other processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from multiprocessing.synchronize import Event
from typing import Generic, TypeVar

from pipeplan.errors import PipeplanError

Result = TypeVar("Result")
Done = Generator[tuple[int, Result], None, None]
"""(number of a job, its result), as they are done."""
Tell = Callable[[float, str], None]
"""(share of the work done, what was done last or comes next)."""


@dataclass(frozen=True, slots=True)
class Job(Generic[Result]):
    """What is done and how; `call` and what it returns are pickled to cross processes."""

    what: str
    call: Callable[[], Result]


def run_jobs(jobs: Sequence[Job[Result]], processes: int, tell: Tell) -> list[Result | None]:
    """The results of `jobs`, in their order; None for those that Ctrl-C left undone.

    Args:
        jobs: begun in this order, so that the longest should come first.
        processes: how many at once; 1 runs them here.
        tell: hears what comes next (one at a time) or is done (several).

    Raises:
        PipeplanError: if a process was killed.
        KeyboardInterrupt: if none was done before Ctrl-C.
    """
    several = processes > 1 and len(jobs) > 1
    done = _at_once(jobs, processes, tell) if several else _one_by_one(jobs, tell)
    results: list[Result | None] = [None] * len(jobs)
    try:
        for index, result in done:
            results[index] = result
    except KeyboardInterrupt:
        if all(result is None for result in results):
            raise
    finally:
        done.close()
    return results


def whole_only(
    elapsed: float, best: Fraction | None, bound: Fraction, gap: float | None, phase: str
) -> None:
    """Hears a search within a job: Ctrl-C ends the job with it, half a search compares nothing.

    Raises:
        KeyboardInterrupt: if the search was interrupted, which would keep what it had found.
    """
    if phase == "interrupted":
        raise KeyboardInterrupt


def _one_by_one(jobs: Sequence[Job[Result]], tell: Tell) -> Done[Result]:
    for index, job in enumerate(jobs):
        tell(index / len(jobs), job.what)
        yield index, job.call()


def _at_once(jobs: Sequence[Job[Result]], processes: int, tell: Tell) -> Done[Result]:
    # Not forked: a solver or progress bar may have threads here.
    context = multiprocessing.get_context("spawn")
    over = context.Event()
    count = min(processes, len(jobs))
    with ProcessPoolExecutor(count, context, initializer=_obey, initargs=(over,)) as pool:
        with _without_ctrl_c():
            numbers = {pool.submit(job.call): number for number, job in enumerate(jobs)}
        try:
            tell(0.0, jobs[0].what)
            for done, future in enumerate(as_completed(numbers), 1):
                number = numbers[future]
                yield number, future.result()
                tell(done / len(jobs), f"done: {jobs[number].what}")
        except BrokenProcessPool:
            raise PipeplanError(
                "compare: one of the processes was killed, perhaps for want of memory."
                " Run fewer at once (--jobs 1)."
            ) from None
        except BaseException:
            over.set()
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Processes that begin inside never get Ctrl-C: it is their parent's, which hears it after."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _obey(over: Event) -> None:
    """No work is left behind: a process ends with its parent, or when all is over."""
    threading.Thread(target=_end_after, args=(over.wait,), daemon=True).start()
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_after, args=(parent.join,), daemon=True).start()


def _end_after(event: Callable[[], object]) -> None:
    event()
    os._exit(1)
