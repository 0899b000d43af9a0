"""Other processes that train the same layers while we measure.

In a pipelined run all ranks of a machine compute at once and share its memory bandwidth and
caches. A layer timed on an idle machine looks faster than it will be.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import torch

from pipeplan.capture.layer_costs.device_clock import device_of
from pipeplan.capture.layer_costs.layer_timer import LayerTimer, gradient_buffers
from pipeplan.capture.layer_costs.micro_batches import MicroBatches
from pipeplan.capture.split import split
from pipeplan.compiling import compiled
from pipeplan.errors import InputError
from pipeplan.heap import give_back_large_blocks
from pipeplan.repeat import seed_all
from pipeplan.task import load

_READY = "ready"


@contextmanager
def companions(count: int, reference: str, seed: int, threads: int) -> Iterator[None]:
    """Keeps `count` processes sweeping the task `reference` until the block ends.

    Raises:
        InputError: if one of them does not get to its first sweep.
    """
    code = f"from {__name__} import main; main()"
    command = [sys.executable, "-c", code, reference, str(seed), str(threads)]
    pipe = subprocess.PIPE
    started = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(count)]
    try:
        for process in started:
            lines = process.stdout or ()
            if not any(line.strip() == _READY for line in lines):
                raise InputError(
                    f"profile: a companion process for task {reference!r} ended with code"
                    f" {process.wait()} before its first micro-batch. Try without companions."
                )
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate()


def main() -> None:
    """Sweeps the task of the command line until standard input ends."""
    reference, seed, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    threading.Thread(target=_end_with_input, daemon=True).start()
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as starter:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # a task may print
        _train(reference, seed, threads, starter)


def _train(reference: str, seed: int, threads: int, starter: TextIO) -> None:
    """Sweeps the task, and says so once."""
    give_back_large_blocks(os.environ)  # as the ranks of a run do
    torch.set_num_threads(threads)
    seed_all(seed)
    task = load(reference, seed)
    place = device_of(task.model)
    task = place.bring(task)
    model = compiled(split(task, evaluates=False))
    sweep = LayerTimer(model, MicroBatches(task), task.loss, place)
    microbatch = 0
    with gradient_buffers(model.layers, task.accumulate):
        while True:
            sweep.train(microbatch)
            if microbatch == 0:
                print(_READY, file=starter, flush=True)
            microbatch += 1


def _end_with_input() -> None:
    sys.stdin.read()
    os._exit(0)
