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
from pipeplan.capture.measurement.task_profile import profile_task
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


def _setting(ranks: int, layers: Sequence[Layer], microbatches: int) -> Setting:
    named = (each.model_copy(update={"name": f"sleep{i}"}) for i, each in enumerate(layers))
    chain = Chain(name="sleeping", layers=tuple(named))
    return Setting(chain, uniform(ranks, 2**40, latency_ns=LATENCY_NS), microbatches=microbatches)


def _asleep(forward_ns: int) -> Layer:
    """A layer that sleeps and does nothing else."""
    return Layer(
        name="sleep",
        forward_ns=forward_ns,
        backward_ns=2 * forward_ns,
        output_bytes=4 * ROWS * WIDTH,
    )


def profiled(forward_ns: int) -> Layer:
    """A layer with a split backward: its sleeps, and the processor's time that a profile finds."""
    found = profile_task(_task(_sleepers(3, forward_ns, Log(), split=True))).layers[1]
    assert found.backward_weight_ns is not None
    return _asleep(forward_ns).model_copy(
        update={
            "forward_ns": forward_ns + found.forward_ns,
            "backward_ns": 2 * forward_ns + found.backward_ns,
            "backward_weight_ns": forward_ns + found.backward_weight_ns,
            "saved_for_weight_bytes": 0,
        }
    )


def _stages(count: int, ranks: int) -> tuple[Stage, ...]:
    return tuple(Stage(id=i, layers=(i, i), gpu=i % ranks) for i in range(count))


def flush_plan(ranks: int, chunks: int, forward_ns: int, microbatches: int) -> Plan:
    """1F1B with flush; looped (interleaved) with several chunks per rank."""
    count = ranks * chunks
    setting = _setting(ranks, [_asleep(forward_ns)] * count, microbatches)
    outline = setting.outline(_stages(count, ranks), "flush", "benchmark")
    lists = (
        flush.one_f_one_b(ranks, microbatches)
        if chunks == 1
        else interleaved.looped(ranks, microbatches, chunks=chunks)
    )
    return listed_plan(outline, lists, microbatches)


def twobw_plan(ranks: int, forward_ns: int, microbatches: int) -> Plan:
    """1F1B that never drains, with what latency needs in flight."""
    setting = _setting(ranks, [_asleep(forward_ns)] * ranks, microbatches)
    outline = setting.outline(_stages(ranks, ranks), "2bw", "benchmark")
    plan = eager_plan(outline, Policy(staircase(ranks, ranks + 1)))
    assert plan is not None
    return plan


def step_plan(ranks: int, layer: Layer, microbatches: int, overhead_ns: int) -> Plan:
    """The planner's, of a whole step, with two layers like `layer` for each rank."""
    setting = _setting(ranks, [layer] * (2 * ranks), microbatches)
    config = Config(semantics="flush", microbatches=microbatches, time_limit_s=PLANNING_S)
    cluster = setting.cluster.model_copy(update={"action_overhead_ns": overhead_ns})
    return planner.solve(setting.chain, cluster, config)


def _sleepers(count: int, forward_ns: int, log: Log, *, split: bool) -> tuple[Sleeper, ...]:
    return tuple(Sleeper(log, i, forward_ns, split=split) for i in range(count))


def _task(layers: Sequence[Sleeper]) -> Task:
    rows = torch.zeros(ROWS, WIDTH)
    return Task(
        model=list(layers),
        loss=mean,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        data=lambda _: (rows, rows[:1, :1]),
    )


def ours(plan: Plan, steps: int, forward_ns: int, transport: Transport) -> list[Slept]:
    """What this rank did under our executor."""
    log = Log()
    split = plan.chain.layers[0].backward_weight_ns is not None
    layers = _sleepers(len(plan.chain.layers), forward_ns, log, split=split)
    task = _task(layers)
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
