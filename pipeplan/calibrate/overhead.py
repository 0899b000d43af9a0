"""What an action costs beyond its kernels: the real executor around layers with little to do.

The main thread's own time is counted, not the clock on the wall, so a busy machine and waiting for
peers do not spoil it. Each forward or backward carries its share of receiving, sending, freeing,
voting and updating. What the layers cost by themselves is subtracted: a profile has it.

Between two actions of a training, kernels fill the processor's caches. So each layer here
multiplies matrices: without them an action seems to cost a fifth to a third less than it does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

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
_KERNEL = 512
"""Rows and columns of the matrices that a layer multiplies in each pass: 1 to 2 ms of one core."""


class _Kernel:
    """A product of matrices, and how long all of them took."""

    def __init__(self) -> None:
        self.spent_ns = 0
        self._factor = torch.ones(_KERNEL, _KERNEL)

    def run(self) -> None:
        begin = time.thread_time_ns()
        torch.mm(self._factor, self._factor)
        self.spent_ns += time.thread_time_ns() - begin

    def time_beside(self, work: Callable[[], object]) -> int:
        """Ns of this thread that `work` takes, its products left out."""
        begin, before = time.thread_time_ns(), self.spent_ns
        work()
        return time.thread_time_ns() - begin - (self.spent_ns - before)


class _WithKernel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, kernel: _Kernel) -> Tensor:
        ctx.kernel = kernel
        kernel.run()
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.kernel.run()
        return gradient.clone(), None


class _Layer(nn.Linear):
    """A small layer with a product in each pass."""

    def __init__(self, kernel: _Kernel) -> None:
        super().__init__(_WIDTH, _WIDTH)
        self.kernel = kernel

    def forward(self, value: Tensor) -> Tensor:
        made: Tensor = _WithKernel.apply(super().forward(value), self.kernel)  # type: ignore[no-untyped-call]
        return made


def measure_overhead(transport: Transport) -> int:
    """Ns per forward or backward: the median over steps of the slowest rank."""
    kernel = _Kernel()
    task, split = _small(transport.size, kernel)
    plan = _plan(transport.size)
    feed = TaskFeed(task, split, Uses.of(plan, split, transport.rank))
    worker = build(
        plan, one_f_one_b_plan(transport.size), split, task, feed, transport, Observer(), seed=0
    )
    layer = split.layers[transport.rank]
    bare = [kernel.time_beside(partial(_bare, task, layer)) for _ in range(STEPS)]
    run = [kernel.time_beside(partial(worker.executor.run, step, 1)) for step in range(STEPS)]
    more = statistics.median(run) - statistics.median(bare)
    mine = max(0, int(more)) // (2 * MICROBATCHES)
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


def _small(ranks: int, kernel: _Kernel) -> tuple[Task, SplitModel]:
    rows, target = torch.zeros(1, _WIDTH), torch.zeros(1, _WIDTH)
    layers = [_Layer(kernel) for _ in range(ranks)]
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


def _bare(task: Task, layer: nn.Module) -> None:
    """The forwards and backwards of a step of the layer with a loss, without any executor."""
    assert task.loss is not None
    for number in range(MICROBATCHES):
        rows, target = task.data(number)
        task.loss(layer(rows), target).backward()
