"""What an action costs beyond its kernels: the real executor around layers whose time is left out.

The main thread's own time is counted, not the clock on the wall, so a busy machine and waiting for
peers do not spoil it. Each forward or backward carries its share of receiving, sending, freeing,
voting and updating. What the layers cost is subtracted: a profile has it.

Each rank has a layer of a transformer, and messages are as large as what passes between its likes:
a layer fills the processor's caches, so that the same actions cost two to three times as much
behind it as behind one that does nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

STEPS = 3
MICROBATCHES = 40
"""Of a step: so many that its vote and update, which are no part of an action, hardly show."""
_TOKENS, _WIDTH = 128, 256
"""What passes between stages: 128 KiB, the most that goes by a local socket."""


class _Stopwatch:
    """How long a layer took in all."""

    def __init__(self) -> None:
        self.spent_ns = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        begin = time.thread_time_ns()
        yield
        self.spent_ns += time.thread_time_ns() - begin

    def time_beside(self, work: Callable[[], object]) -> int:
        """Ns of this thread that `work` takes, the layer left out."""
        begin, before = time.thread_time_ns(), self.spent_ns
        work()
        return time.thread_time_ns() - begin - (self.spent_ns - before)


class _Timed(torch.autograd.Function):
    """A layer with a graph of its own, so that both of its passes can be timed."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, layer: _TransformerLayer) -> Tensor:
        ctx.layer, ctx.input = layer, value.detach().requires_grad_()
        with layer.watch.running(), torch.enable_grad():
            output: Tensor = layer.block(ctx.input)
        ctx.output = output
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        with ctx.layer.watch.running():
            torch.autograd.backward(ctx.output, gradient)
        return ctx.input.grad, None


class _TransformerLayer(nn.Module):
    """One layer of a transformer."""

    def __init__(self, watch: _Stopwatch) -> None:
        super().__init__()
        self.watch = watch
        self.block = nn.TransformerEncoderLayer(
            _WIDTH, nhead=4, dim_feedforward=4 * _WIDTH, dropout=0.0, batch_first=True
        )
        self.scale = nn.Parameter(torch.ones(_WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        # The product, which a graph of the stage holds: without one there is nothing to go back.
        timed: Tensor = _Timed.apply(value * self.scale, self)  # type: ignore[no-untyped-call]
        return timed


def measure_overhead(transport: Transport) -> int:
    """Ns per forward or backward: the median over steps, the mean over ranks."""
    watch = _Stopwatch()
    task, split = _layers(transport.size, watch)
    plan = _plan(transport.size)
    feed = TaskFeed(task, split, Uses.of(plan, split, transport.rank))
    worker = build(
        plan, one_f_one_b_plan(transport.size), split, task, feed, transport, Observer(), seed=0
    )
    passes = partial(_passes, task, split, transport.rank)
    bare = [watch.time_beside(passes) for _ in range(STEPS)]
    run = [watch.time_beside(partial(worker.executor.run, step, 1)) for step in range(STEPS)]
    more = statistics.median(run) - statistics.median(bare)
    mine = max(0, int(more)) // (2 * MICROBATCHES)
    told: list[int] = transport.gather(mine)
    return round(statistics.mean(told))


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


def _layers(ranks: int, watch: _Stopwatch) -> tuple[Task, SplitModel]:
    rows = torch.zeros(1, _TOKENS, _WIDTH)
    layers = [_TransformerLayer(watch) for _ in range(ranks)]
    task = Task(
        model=layers,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        data=lambda _: (rows, rows),
    )
    return task, SplitModel(
        layers=tuple(layers),
        names=tuple(f"layer{i}" for i in range(ranks)),
        fqns=tuple(
            {name: f"{i}.{name}" for name, _ in layer.named_parameters()}
            for i, layer in enumerate(layers)
        ),
        boundaries=tuple(
            (TensorSpec((1, _TOKENS, _WIDTH), "torch.float32", i > 0),) for i in range(ranks)
        ),
        microbatch_size=1,
    )


def _plan(ranks: int) -> Plan:
    """Only stages and step size matter to the runtime."""
    layers = (
        Layer(name=f"layer{i}", forward_ns=1, backward_ns=1, output_bytes=4 * _TOKENS * _WIDTH)
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


def _passes(task: Task, split: SplitModel, rank: int) -> None:
    """The forwards and backwards of a step of the rank's layer, without any executor.

    As in a run, the first layer's input needs no gradient, and the last one has the loss.
    """
    assert task.loss is not None
    layer, last = split.layers[rank], len(split.layers) - 1
    for number in range(MICROBATCHES):
        rows, target = task.data(number)
        made = layer(rows.detach().requires_grad_(rank > 0))
        if rank == last:
            task.loss(made, target).backward()
        else:
            made.backward(target)
