"""The sleeping layers under our executor and under torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

from benchmarks.sleeping import ROWS, WIDTH, Log, Sleeper, Slept, mean
from pipeplan import lowering, planner
from pipeplan.baselines import flush, interleaved
from pipeplan.baselines.eager import Policy, eager_plan
from pipeplan.baselines.listed import listed_plan
from pipeplan.baselines.timed import Setting
from pipeplan.chain import Chain, Layer
from pipeplan.cluster import uniform
from pipeplan.plan import Plan, Stage
from pipeplan.planner import Config
from pipeplan.runtime.build import build
from pipeplan.runtime.data.feed import TaskFeed, Uses
from pipeplan.runtime.interfaces import Observer
from pipeplan.runtime.transport.base import Transport
from pipeplan.self_timed import staircase
from pipeplan.split_model import SplitModel, TensorSpec
from pipeplan.task import Task

LATENCY_NS = 300_000
"""What the 2bw plan and the step plan assume of a message: one that assumes none has no slack."""
PLANNING_S = 10.0
"""For a step plan."""


def _setting(
    ranks: int, stages: int, forward_ns: int, microbatches: int, *, split: bool = False
) -> Setting:
    halves = {"backward_weight_ns": forward_ns, "saved_for_weight_bytes": 0} if split else {}
    layers = tuple(
        Layer(
            name=f"sleep{i}",
            forward_ns=forward_ns,
            backward_ns=2 * forward_ns,
            output_bytes=4 * ROWS * WIDTH,
            **halves,
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


def step_plan(ranks: int, forward_ns: int, microbatches: int, overhead_ns: int) -> Plan:
    """The planner's, of a whole step; layers have split backwards, two for each rank."""
    setting = _setting(ranks, 2 * ranks, forward_ns, microbatches, split=True)
    config = Config(semantics="flush", microbatches=microbatches, time_limit_s=PLANNING_S)
    cluster = setting.cluster.model_copy(update={"action_overhead_ns": overhead_ns})
    return planner.solve(setting.chain, cluster, config)


def ours(plan: Plan, steps: int, forward_ns: int, transport: Transport) -> list[Slept]:
    """What this rank did under our executor."""
    log = Log()
    split = plan.chain.layers[0].backward_weight_ns is not None
    layers = tuple(Sleeper(log, i, forward_ns, split=split) for i in range(len(plan.chain.layers)))
    rows = torch.zeros(ROWS, WIDTH)
    task = Task(
        model=list(layers),
        loss=mean,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        data=lambda _: (rows, rows[:1, :1]),
    )
    spec = TensorSpec((ROWS, WIDTH), "torch.float32", True)
    model = SplitModel(
        layers=layers,
        names=tuple(layer.name for layer in plan.chain.layers),
        fqns=tuple(
            {name: f"{i}.{name}" for name, _ in layer.named_parameters()}
            for i, layer in enumerate(layers)
        ),
        boundaries=((spec,),) * len(layers),
        microbatch_size=ROWS,
    )
    feed = TaskFeed(task, model, Uses.of(plan, model, transport.rank))
    pattern = lowering.lower(plan)
    worker = build(plan, pattern, model, task, feed, transport, Observer(), seed=0)
    transport.gather(None)
    worker.executor.run(0, steps)
    return log.entries


class Torchs(NamedTuple):
    """A schedule of torch's, and the layers of a rank, one stage each."""

    schedule: Callable[..., Any]
    layers: Callable[[int, int], Sequence[int]]
    """(rank, ranks) -> layers."""
    split: bool = False


TORCHS = {
    "1F1B": Torchs(
        lambda stages, *args, **named: Schedule1F1B(stages[0], *args, **named),
        lambda rank, _: (rank,),
    ),
    "interleaved": Torchs(ScheduleInterleaved1F1B, lambda rank, ranks: (rank, ranks + rank)),
    "interleaved zero bubble": Torchs(
        ScheduleInterleavedZeroBubble, lambda rank, ranks: (rank, ranks + rank), split=True
    ),
    "ZBV": Torchs(
        ScheduleZBVZeroBubble, lambda rank, ranks: (rank, 2 * ranks - 1 - rank), split=True
    ),
}


def torchs(
    name: str, ranks: int, steps: int, forward_ns: int, microbatches: int, transport: Transport
) -> list[Slept]:
    """What this rank did under the schedule `name` of `TORCHS`."""
    log, device, of = Log(), torch.device("cpu"), TORCHS[name]
    held = of.layers(transport.rank, ranks)
    count = len(held) * ranks
    example = torch.zeros(ROWS, WIDTH, requires_grad=True)
    mine = [
        PipelineStage(
            Sleeper(log, index, forward_ns, split=of.split),
            index,
            count,
            device,
            input_args=(example,),
            output_args=(example,),
        )
        for index in held
    ]
    schedule = of.schedule(mine, microbatches, loss_fn=mean)
    whole = torch.zeros(ROWS * microbatches, WIDTH)
    args: tuple[Tensor, ...] = (whole,) if transport.rank == 0 else ()
    last = count - 1 in held
    dist.barrier()
    for _ in range(steps):
        schedule.step(*args, **({"target": whole} if last else {}))
    return log.entries
