"""What an action costs beyond its kernels: the real executor around layers that do nearly nothing.

The main thread's own time is counted, not the clock on the wall, so a busy machine and waiting for
peers do not spoil it. Each forward or backward carries its share of receiving, sending, freeing,
voting and updating. What the tiny layers cost by themselves is subtracted: a profile has it.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

from pipeplan.chain import Chain, Layer
from pipeplan.cluster import uniform
from pipeplan.plan import Plan, Stage
from pipeplan.program import ActionKind as Kind
from pipeplan.program import Pattern, PeriodicAction
from pipeplan.runtime.build import build
from pipeplan.runtime.data.feed import TaskFeed, Uses
from pipeplan.runtime.interfaces import Observer
from pipeplan.runtime.transport.base import Transport
from pipeplan.split_model import SplitModel, TensorSpec
from pipeplan.task import Task

STEPS = 5
MICROBATCHES = 40
_WIDTH = 16


def measure_overhead(transport: Transport) -> int:
    """Ns per forward or backward: the median over steps of the slowest rank."""
    task, split = _tiny(transport.size)
    plan = _plan(transport.size)
    feed = TaskFeed(task, split, Uses.of(plan, split, transport.rank))
    worker = build(
        plan, one_f_one_b_plan(transport.size), split, task, feed, transport, Observer(), seed=0
    )
    bare = min(_bare(task, split.layers[transport.rank]) for _ in range(STEPS))
    spent = []
    for step in range(STEPS):
        begin = time.thread_time_ns()
        worker.executor.run(step, 1)
        spent.append((time.thread_time_ns() - begin) // (2 * MICROBATCHES))
    mine = max(0, int(statistics.median(spent)) - bare)
    return max(int(cost) for cost in transport.gather(mine))


def one_f_one_b_plan(ranks: int) -> Pattern:
    """Rank r hosts stage r; one forward and one backward per period, drained after each step."""
    lists = []
    for rank in range(ranks):
        first, last = rank == 0, rank == ranks - 1
        forward, backward = rank, 2 * ranks - 1 - rank
        steps = [
            (Kind.RECV_F, forward, not first),
            (Kind.F, forward, True),
            (Kind.SEND_F, forward, not last),
            (Kind.RECV_B, backward, not last),
            (Kind.B, backward, True),
            (Kind.SEND_B, backward, not first),
            (Kind.FREE_F, forward + 2, not last),
            (Kind.FREE_B, backward + 2, not first),
        ]
        lists.append(tuple(PeriodicAction(k, rank, 0, shift) for k, shift, on in steps if on))
    return Pattern(1, "flush", MICROBATCHES, tuple(lists), tuple((r,) for r in range(ranks)))


def _tiny(ranks: int) -> tuple[Task, SplitModel]:
    rows, target = torch.zeros(1, _WIDTH), torch.zeros(1, _WIDTH)
    layers = [nn.Linear(_WIDTH, _WIDTH) for _ in range(ranks)]
    task = Task(
        model=layers,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        data=lambda _: (rows, target),
    )
    return task, SplitModel(
        layers=tuple(layers),
        names=tuple(f"layer{i}" for i in range(ranks)),
        fqns=tuple({name: f"{i}.{name}" for name in ("weight", "bias")} for i in range(ranks)),
        boundaries=tuple((TensorSpec((1, _WIDTH), "torch.float32", i > 0),) for i in range(ranks)),
        microbatch_size=1,
    )


def _plan(ranks: int) -> Plan:
    """Only stages and step size matter to the runtime."""
    layers = (
        Layer(name=f"layer{i}", forward_ns=1, backward_ns=1, output_bytes=4 * _WIDTH)
        for i in range(ranks)
    )
    chain = Chain(name="calibration", layers=tuple(layers))
    return Plan(
        chain=chain,
        chain_digest=chain.digest(),
        cluster=uniform(ranks, 2**30),
        semantics="flush",
        microbatches=MICROBATCHES,
        period_ns=1,
        step_ns=1,
        stages=tuple(Stage(id=i, layers=(i, i), gpu=i) for i in range(ranks)),
        ops=(),
        memory=(),
    )


def _bare(task: Task, layer: nn.Module) -> int:
    """Ns per forward or backward of the layer with a loss, without any executor."""
    assert task.loss is not None
    begin = time.thread_time_ns()
    for number in range(MICROBATCHES):
        rows, target = task.data(number)
        task.loss(layer(rows), target).backward()
    return (time.thread_time_ns() - begin) // (2 * MICROBATCHES)
