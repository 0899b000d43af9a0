"""What counting the bytes of a sampled step costs: CPU time of ranks with it and without.

CPU time of the ranks' threads, each the least of `ROUNDS` steps, so a busy machine hardly shows in
it. `afterwards` is what sorting a step's storages by terms takes, once, when the run is over.

    python -m benchmarks.sampling
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from pipeplan import lowering, tasks
from pipeplan.capture import profile_task, split
from pipeplan.cluster import uniform
from pipeplan.planner import Config, solve
from pipeplan.runtime.build import Worker, build
from pipeplan.runtime.data.feed import TaskFeed, Uses
from pipeplan.runtime.instrument import CountedFeed, CountedTransport
from pipeplan.runtime.instrument.sampling import SampledSteps
from pipeplan.runtime.instrument.storage_log import StorageLog
from pipeplan.runtime.interfaces import MemoryMeter, Observer
from pipeplan.runtime.parameters.tied_parameters import untie
from pipeplan.runtime.transport.base import Transport
from pipeplan.task import Task
from pipeplan.testing.in_process import run_ranks

RANKS, MICROBATCHES, ROUNDS = 2, 8, 7
TASKS: Mapping[str, Callable[[], Task]] = {
    "GPT-2 of the tests, batch 8": partial(tasks.gpt2, batch=8),
    "GPT-2 small, one sequence of 32": partial(tasks.gpt2, size="small", batch=1, sequence=32),
    "ResNet-18 of width 16, batch 8": partial(tasks.resnet, width=16, batch=8),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one step, ns of CPU time of the rank's thread."""

    plain: int
    counted: int
    afterwards: int
    changes: int
    """Storages that came or went."""


def measure(make: Callable[[], Task]) -> list[Cost]:
    """Of each rank."""
    torch.set_num_threads(1)
    task = make()
    chain = profile_task(task, repeats=1, warmup=0)
    config = Config(semantics="flush", microbatches=MICROBATCHES, method="contiguous", k=1)
    plan = solve(chain, uniform(RANKS, 2**40, bandwidth_bytes_per_s=10**12), config)
    model, pattern = untie(split(task), task.tied), lowering.lower(plan)

    def work(transport: Transport) -> Cost:
        log = StorageLog()
        log.idle = True
        feed = CountedFeed(TaskFeed(task, model, Uses.of(plan, model, transport.rank)), log)
        wrapped = CountedTransport(transport, log)
        worker = build(plan, pattern, model, task, feed, wrapped, Observer(), seed=0)
        worker.executor.run(0, 2)
        plain, counted = [], []
        for step in range(2, 2 + 2 * ROUNDS, 2):
            worker.executor.watch(MemoryMeter())
            plain.append(_timed(worker, step))
            meter = SampledSteps(log, "flush")
            meter.watch(worker)
            counted.append(_timed(worker, step + 1, meter))
        begin = time.thread_time_ns()
        meter.memory()
        afterwards = time.thread_time_ns() - begin
        return Cost(min(plain), min(counted), afterwards, meter.changes)

    return run_ranks(RANKS, work)


def _timed(worker: Worker, step: int, meter: SampledSteps | None = None) -> int:
    begin = time.thread_time_ns()
    with meter or nullcontext():
        worker.executor.run(step, 1)
    return time.thread_time_ns() - begin


if __name__ == "__main__":
    for name, make in TASKS.items():
        for rank, cost in enumerate(measure(make)):
            print(
                f"{name}, rank {rank}: {cost.plain / 1e6:.1f} ms a step,"
                f" {cost.counted / 1e6:.1f} ms counted ({cost.counted / cost.plain - 1:+.0%}),"
                f" {cost.afterwards / 1e6:.1f} ms afterwards, {cost.changes} changes"
            )
