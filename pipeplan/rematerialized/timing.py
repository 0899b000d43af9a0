"""How long each operation takes, in the machinery that will run it.

To plan, two schedules are run on the sample, as the handed out module runs its own: every layer
keeps its input and runs again before its backward. In the first one layers that run again get
their random numbers and buffers back, in the second one not, which is what a layer pays that runs
once. Both hold what measuring may hold: all boundaries and one tape. What a call takes beside its
operations (checks, making its pass, the ends of autograd) is counted with the loss.

How long an operation takes depends on what ran before it: tensors that are still in a cache, pages
that the allocator must get anew. Hence the plan that was found is rehearsed: its own schedule is
run, and its time is told from the times of its operations there.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from pipeplan.capture.layer_costs.device_clock import DeviceClock, ModelDevice
from pipeplan.capture.measurement.task_profile import layer_times
from pipeplan.remat import Costs, DeviceOp, DeviceOpKind, DeviceSchedule
from pipeplan.remat.checkpointing.periodic import periodic
from pipeplan.rematerialized.measured import Sample
from pipeplan.rematerialized.script import Script, script_of
from pipeplan.rematerialized.steps import Watch

Run = Callable[[Script, Tensor, Watch], Tensor]
"""Calls the module with a script and an input; each operation runs inside of the watch."""
WARMUP = 2


def with_times(costs: Costs, run: Run, sample: Sample, place: ModelDevice, repeats: int) -> Costs:
    """`costs` with the times of all operations, the loss's among them.

    A light forward is charged what comes of it: keeping random numbers and buffers, and putting
    them back when the layer runs again.

    Args:
        costs: sizes; the last layer is the loss.
        run: the module.
        sample: its input, and the loss.
        place: gives the clock.
        repeats: calls of each schedule, after `WARMUP` ones.
    """
    again = script_of(periodic(costs, costs.layers))
    once = replace(again, again=frozenset())

    def call(_: int) -> tuple[list[int], ...]:
        first, second = (_Call.of(run, script, sample, place.clock) for script in (again, once))
        rows = (
            (DeviceOpKind.KEEP_ALL, second),
            (DeviceOpKind.BACKWARD, second),
            (DeviceOpKind.KEEP_INPUT, first),
        )
        kinds = [call.row(costs, kind) for kind, call in (*rows, (DeviceOpKind.KEEP_ALL, first))]
        return (*kinds, second.rests)

    (forward, backward, light, restored, rests), _ = layer_times(
        call, repeats, WARMUP, lambda _: None
    )
    pairs = zip(light, restored, forward, strict=True)
    # Never less than it took itself: differences of single calls would make it free.
    lights = [first + max(0, more - plain) for first, more, plain in pairs]
    return _with_rests(costs, forward, lights, backward, rests)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What running a schedule shows."""

    costs: Costs
    """With the times of the schedule's operations; others have the times they had."""
    spread: float | None
    """Between the quartiles of whole calls, as a share of their median: the machine's noise.

    None where there was only one.
    """


def rehearsed(
    costs: Costs,
    schedule: DeviceSchedule,
    run: Run,
    sample: Sample,
    place: ModelDevice,
    repeats: int,
) -> Rehearsal:
    """`costs` with times such that those of the operations of `schedule` add up to its calls'.

    An operation that runs several times is charged the mean of these, what a call takes beside
    its operations is charged to the loss; waits for transfers are the channel's affair.

    Args:
        costs: what `schedule` was planned with; the last layer is the loss.
        schedule: whatever it holds is alive during the rehearsal.
        run: the module.
        sample: its input, and the loss.
        place: gives the clock.
        repeats: calls, after `WARMUP` ones.
    """
    script = script_of(schedule)
    wholes: list[int] = []

    def call(_: int) -> tuple[list[int], ...]:
        one = _Call.of(run, script, sample, place.clock)
        wholes.append(sum(one.wholes))
        light = one.row(
            costs, DeviceOpKind.KEEP_INPUT, DeviceOpKind.KEEP_NOTHING, else_=costs.light
        )
        kinds = [one.row(costs, kind) for kind in (DeviceOpKind.KEEP_ALL, DeviceOpKind.BACKWARD)]
        return (*kinds, light, one.rests)

    (forward, backward, light, rests), _ = layer_times(call, repeats, WARMUP, lambda _: None)
    found = _with_rests(costs, forward, light, backward, rests)
    return Rehearsal(found, _spread(wholes[WARMUP:]))


def _with_rests(
    costs: Costs, forward: list[int], light: list[int], backward: list[int], rests: list[int]
) -> Costs:
    """`costs` with these times of the module's layers, and what is left of calls as the loss's."""
    before, behind = rests
    return replace(
        costs,
        forward=(*forward, before),
        light=(*light, before),
        backward=(*backward, behind),
    )


def _spread(wholes: list[int]) -> float | None:
    if len(wholes) < 2:
        return None
    low, middle, high = statistics.quantiles(wholes, n=4, method="inclusive")
    return (high - low) / max(1, middle)


@dataclass
class _Call:
    """One forward and backward of the module, watched."""

    clock: DeviceClock
    parts: list[list[tuple[DeviceOp, Any, Any]]] = field(default_factory=list)
    """What ran in the forward and in the backward, each with the marks around it."""
    ends: list[Any] = field(default_factory=list)
    """Before the forward, between it and the backward, behind that."""

    @classmethod
    def of(cls, run: Run, script: Script, sample: Sample, clock: DeviceClock) -> _Call:
        """A call by `script`, with its loss."""
        one = cls(clock)
        source = sample.source.detach().requires_grad_(sample.source.requires_grad)
        one._begin()
        result = run(script, source, one.watch)
        if sample.loss is not None:
            result = sample.loss[0](result, sample.loss[1])
        one._begin()
        result.backward(torch.ones_like(result))
        one.ends.append(clock.mark())
        return one

    def _begin(self) -> None:
        self.parts.append([])
        self.ends.append(self.clock.mark())

    @contextmanager
    def watch(self, op: DeviceOp) -> Iterator[None]:
        """Marks what lies around `op`."""
        begin = self.clock.mark()
        yield
        self.parts[-1].append((op, begin, self.clock.mark()))

    def row(self, costs: Costs, *kinds: DeviceOpKind, else_: tuple[int, ...] = ()) -> list[int]:
        """Mean time of the operations of `kinds`, layer by layer, without the loss.

        Args:
            costs: of the layers.
            kinds: taken together.
            else_: times of the layers that have no such operation; needed where one has none.
        """
        found: dict[int, list[int]] = defaultdict(list)
        for op, begin, end in (mark for part in self.parts for mark in part):
            if op.kind in kinds:
                found[op.index].append(self.clock.between(begin, end))
        layers = range(costs.layers - 1)
        return [
            round(statistics.mean(found[layer])) if layer in found else else_[layer]
            for layer in layers
        ]

    @property
    def wholes(self) -> list[int]:
        """Time of the forward and of the backward."""
        pairs = zip(self.ends, self.ends[1:], strict=False)
        return [self.clock.between(begin, end) for begin, end in pairs]

    @property
    def rests(self) -> list[int]:
        """What each took beside layers and waits; the loss is part of it."""
        return [
            max(0, whole - sum(self.clock.between(*ends) for op, *ends in part if _charged(op)))
            for whole, part in zip(self.wholes, self.parts, strict=True)
        ]


def _charged(op: DeviceOp) -> bool:
    return op.computes or op.kind is DeviceOpKind.WAIT
