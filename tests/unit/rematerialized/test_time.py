"""Times of operations add up to those of the runs that they are taken from, by a wound clock."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from pipeplan.remat import Costs, DeviceOp, DeviceOpKind, DeviceSchedule, HostLink, judge
from pipeplan.remat.checkpointing.periodic import keep_all, periodic
from pipeplan.rematerialized.measured import Sample
from pipeplan.rematerialized.script import Script, script_of
from pipeplan.rematerialized.steps import Watch
from pipeplan.rematerialized.timing import rehearsed, with_times

LAYERS, ENTRY, TURN, LOSS, STORING, RESTORING, FREEING = 5, 7, 11, 100, 1000, 20_000, 3
FORWARD = (10, 20, 30, 40)
LIGHT = (8, 16, 24, 32)
BACKWARD = (25, 35, 45, 55)


@dataclass
class Winding:
    """Stands for a clock; work winds it."""

    name: str = "ours"
    now: int = 0

    def mark(self) -> int:
        """Now."""
        return self.now

    def between(self, start: int, end: int) -> int:
        """The difference."""
        return end - start


class Machine:
    """Stands for a module and its place: each operation takes the time it is told to take."""

    def __init__(self, slower: int = 1) -> None:
        self.clock = Winding()
        self._slower = slower
        self.calls: list[int] = []

    def run(self, script: Script, source: Tensor, watch: Watch) -> Tensor:
        """A module's call; checks before it and the ends of autograd are not watched."""
        self.clock.now += ENTRY
        seen: set[int] = set()
        self._part(script, watch, seen, backward=False)
        machine = self

        class Node(torch.autograd.Function):
            @staticmethod
            def forward(ctx: object, value: Tensor) -> Tensor:
                return value.clone()

            @staticmethod
            def backward(ctx: object, gradient: Tensor) -> Tensor:
                machine.clock.now += TURN
                machine._part(script, watch, seen, backward=True)
                return gradient

        result: Tensor = Node.apply(source)  # type: ignore[no-untyped-call]
        return result

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Takes its time, too."""
        self.clock.now += LOSS
        return (output - target).sum()

    def _part(self, script: Script, watch: Watch, seen: set[int], *, backward: bool) -> None:
        for order in script.backward if backward else script.forward:
            with watch(order.op):
                self.clock.now += self._slower * self._takes(order.op, seen, script.again)

    def _takes(self, op: DeviceOp, seen: set[int], again: frozenset[int]) -> int:
        if not op.computes:
            return 10**6 if op.kind is DeviceOpKind.WAIT else FREEING
        if op.kind is DeviceOpKind.BACKWARD:
            return BACKWARD[op.index]
        plain = (FORWARD if op.kind is DeviceOpKind.KEEP_ALL else LIGHT)[op.index]
        if op.index not in again:
            return plain
        extra = RESTORING if op.index in seen else STORING
        seen.add(op.index)
        return plain + extra


def costs() -> Costs:
    """Sizes alone: four layers and the loss."""
    none, one = (0,) * LAYERS, (1,) * LAYERS
    return Costs(
        names=tuple(f"layer{index}" for index in range(LAYERS)),
        forward=none,
        light=none,
        backward=none,
        boundary=(1, *one),
        gradient=one,
        saved_input=none,
        saved=one,
        saved_output=none,
        forward_work=none,
        light_work=none,
        backward_work=none,
    )


def sample(machine: Machine) -> Sample:
    """An input with a gradient, so that there is a backward."""
    return Sample(source=torch.zeros(3, requires_grad=True), loss=(machine.loss, torch.zeros(3)))


def spent(machine: Machine, schedule: DeviceSchedule) -> int:
    """What one call by `schedule` takes, with its loss, unwatched."""
    begin = machine.clock.now
    given = sample(machine)
    result = machine.run(script_of(schedule), given.source, lambda _: nullcontext())
    assert given.loss is not None
    given.loss[0](result, given.loss[1]).backward()
    return machine.clock.now - begin


@pytest.mark.parametrize("segments", range(1, LAYERS + 1))
def test_times_of_a_rehearsal_add_up_to_the_call(segments: int) -> None:
    """Whatever a call takes is charged once: layers, kept and restored states, frees, the loss."""
    machine = Machine()
    schedule = periodic(costs(), segments)
    shown = rehearsed(costs(), schedule, machine.run, sample(machine), machine, 3)
    assert judge(shown.costs, schedule).makespan_ns == spent(machine, schedule)
    assert shown.spread == 0


def test_operations_taken_apart_add_up_in_other_schedules() -> None:
    """Measured where all layers run again, they tell the time where none or few do."""
    machine = Machine()
    found = with_times(costs(), machine.run, sample(machine), machine, 3)
    again = periodic(costs(), LAYERS)
    assert found.forward[:-1] == FORWARD
    assert found.backward[:-1] == BACKWARD
    assert found.light[:-1] == tuple(each + STORING + RESTORING for each in LIGHT)
    for schedule in (keep_all(costs()), again, periodic(costs(), 2)):
        frees = sum(op.kind is DeviceOpKind.FREE for op in schedule.ops)
        more = FREEING * (sum(op.kind is DeviceOpKind.FREE for op in again.ops) - frees)
        assert judge(found, schedule).makespan_ns == spent(machine, schedule) + more


def test_what_a_plan_does_not_run_keeps_its_time() -> None:
    """A rehearsal of a plan without recomputation changes no light forward."""
    machine = Machine()
    first = with_times(costs(), machine.run, sample(machine), machine, 1)
    slow = Machine(slower=2)
    shown = rehearsed(first, keep_all(costs()), slow.run, sample(slow), slow, 1).costs
    assert shown.forward[:-1] == tuple(2 * each for each in FORWARD)
    assert shown.light[:-1] == first.light[:-1]


def test_waits_are_the_channels_affair() -> None:
    """How long the rehearsal waited for a transfer is no time of any operation."""
    machine = Machine()
    ops = list(keep_all(costs()).ops)
    turn = ops.index(DeviceOp(DeviceOpKind.BACKWARD, LAYERS - 1))
    ops[turn + 1 : turn + 1] = [
        DeviceOp(DeviceOpKind.PREFETCH, 1),
        DeviceOp(DeviceOpKind.WAIT, 1),
    ]
    ops.insert(3, DeviceOp(DeviceOpKind.WAIT, 1))
    ops.insert(3, DeviceOp(DeviceOpKind.OFFLOAD, 1))
    with_waits = DeviceSchedule(LAYERS, tuple(ops))
    shown = rehearsed(costs(), with_waits, machine.run, sample(machine), machine, 1).costs
    plain = rehearsed(costs(), keep_all(costs()), machine.run, sample(machine), machine, 1).costs
    assert shown.compute == plain.compute + 2 * FREEING
    assert judge(shown, with_waits, None, HostLink()).violations == ()


def test_spread_is_that_of_the_calls() -> None:
    """Calls of 1 to 5 times the work lie, between quartiles, two thirds of the median apart."""
    machine = Machine()
    pace = iter([1, 1, 1, 2, 3, 4, 5])
    whole = spent(machine, keep_all(costs())) - ENTRY - TURN - LOSS

    def run(script: Script, source: Tensor, watch: Watch) -> Tensor:
        machine._slower = next(pace)
        return machine.run(script, source, watch)

    shown = rehearsed(costs(), keep_all(costs()), run, sample(machine), machine, 5)
    middle = 3 * whole + ENTRY + TURN + LOSS
    assert shown.spread == pytest.approx(2 * whole / middle)
