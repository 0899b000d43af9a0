"""The sleeping layers under our executor and under torch.distributed.pipelining."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
)

from benchmarks.sleeping import ROWS, WIDTH, Log, Sleeper, Slept, mean
from pipeplan import lowering
from pipeplan.baselines import flush, interleaved
from pipeplan.baselines.eager import Policy, eager_plan
from pipeplan.baselines.listed import listed_plan
from pipeplan.baselines.timed import Setting
from pipeplan.chain import Chain, Layer
from pipeplan.cluster import uniform
from pipeplan.plan import Plan, Stage
from pipeplan.runtime.build import build
from pipeplan.runtime.data.feed import TaskFeed, Uses
from pipeplan.runtime.interfaces import Observer
from pipeplan.runtime.transport.base import Transport
from pipeplan.self_timed import staircase
from pipeplan.task import SplitModel, Task, TensorSpec

LATENCY_NS = 300_000
"""What the 2bw plan assumes of a message: a plan that assumes none has no slack."""


def _setting(ranks: int, stages: int, forward_ns: int, microbatches: int) -> Setting:
    layers = tuple(
        Layer(
            name=f"sleep{i}",
            forward_ns=forward_ns,
            backward_ns=2 * forward_ns,
            output_bytes=4 * ROWS * WIDTH,
        )
        for i in range(stages)
    )
    cluster = uniform(ranks, 2**40, latency_ns=LATENCY_NS)
    return Setting(Chain(name="sleeping", layers=layers), cluster, microbatches=microbatches)


def _stages(count: int, ranks: int) -> tuple[Stage, ...]:
    return tuple(Stage(id=i, layers=(i, i), gpu=i % ranks) for i in range(count))


def flush_plan(ranks: int, chunks: int, forward_ns: int, microbatches: int) -> Plan:
    """1F1B with flush; looped (interleaved) with several chunks per rank."""
    count = ranks * chunks
    setting = _setting(ranks, count, forward_ns, microbatches)
    outline = setting.outline(_stages(count, ranks), "flush", "benchmark")
    lists = (
        flush.one_f_one_b(ranks, microbatches)
        if chunks == 1
        else interleaved.looped(ranks, microbatches, chunks=chunks)
    )
    return listed_plan(outline, lists, microbatches)


def twobw_plan(ranks: int, forward_ns: int, microbatches: int) -> Plan:
    """1F1B that never drains, with what latency needs in flight."""
    setting = _setting(ranks, ranks, forward_ns, microbatches)
    outline = setting.outline(_stages(ranks, ranks), "2bw", "benchmark")
    plan = eager_plan(outline, Policy(staircase(ranks, ranks + 1)))
    assert plan is not None
    return plan


def ours(plan: Plan, steps: int, forward_ns: int, transport: Transport) -> list[Slept]:
    """What this rank did under our executor."""
    log = Log()
    layers = tuple(Sleeper(log, i, forward_ns) for i in range(len(plan.stages)))
    rows = torch.zeros(ROWS, WIDTH)
    task = Task(
        model=list(layers),
        loss=mean,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        data=lambda _: (rows, rows[:1, :1]),
    )
    spec = TensorSpec((ROWS, WIDTH), "torch.float32", True)
    split = SplitModel(
        layers=layers,
        names=tuple(layer.name for layer in plan.chain.layers),
        fqns=tuple({} for _ in layers),
        boundaries=((spec,),) * len(layers),
        microbatch_size=ROWS,
    )
    feed = TaskFeed(task, split, Uses.of(plan, split, transport.rank))
    pattern = lowering.lower(plan)
    worker = build(plan, pattern, split, task, feed, transport, Observer(), seed=0)
    transport.gather(None)
    worker.executor.run(0, steps)
    return log.entries


def torchs(
    ranks: int, chunks: int, steps: int, forward_ns: int, microbatches: int, transport: Transport
) -> list[Slept]:
    """What this rank did under torch's 1F1B, or interleaved 1F1B with several chunks."""
    log, count, device = Log(), ranks * chunks, torch.device("cpu")
    example = torch.zeros(ROWS, WIDTH, requires_grad=True)
    mine = [
        PipelineStage(
            Sleeper(log, index, forward_ns),
            index,
            count,
            device,
            input_args=(example,),
            output_args=(example,),
        )
        for index in range(transport.rank, count, ranks)
    ]
    schedule = (
        Schedule1F1B(mine[0], microbatches, loss_fn=mean)
        if chunks == 1
        else ScheduleInterleaved1F1B(mine, microbatches, loss_fn=mean)
    )
    whole = torch.zeros(ROWS * microbatches, WIDTH)
    args: tuple[Tensor, ...] = (whole,) if transport.rank == 0 else ()
    last = transport.rank == ranks - 1
    dist.barrier()
    for _ in range(steps):
        schedule.step(*args, **({"target": whole} if last else {}))
    return log.entries
