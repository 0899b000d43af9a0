"""An order of forwards and backwards, and the units that may leave the device between two uses.

What every offloading planner reads: (O1)-(O3) of docs/reference/remat-rules.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipeplan.remat.arrays import Ints
from pipeplan.remat.schedules.costs import Costs
from pipeplan.remat.schedules.device_state import DeviceState
from pipeplan.remat.schedules.schedule import DeviceOp, DeviceOpKind, DeviceSchedule


@dataclass(frozen=True)
class OffloadUnit:
    """A unit unused for a while around the turn; positions are those of `ComputeOrder.ops`."""

    index: int
    size: int
    ready: int
    """Its copy to the host may be issued just before this operation."""
    away: int
    """The first operation that runs without it."""
    due: int
    """The next operation that uses it."""


@dataclass(frozen=True)
class ComputeOrder:
    """Operations without transfers, what each needs, and what may be away meanwhile.

    Attributes:
        need: bytes of each operation while nothing is offloaded.
        held: bytes behind each operation, likewise.
        time: ns of each operation.
        units: those with bytes, by `ready`; their windows are nested around the turn.
    """

    layers: int
    static: int
    ops: tuple[DeviceOp, ...]
    need: Ints
    held: Ints
    time: Ints
    units: tuple[OffloadUnit, ...]

    @cached_property
    def leavable(self) -> Ints:
        """Bytes of units that may be away at each operation (O2)."""
        found = np.zeros(len(self.ops), dtype=np.int64)
        for unit in self.units:
            found[unit.away : unit.due] += unit.size
        return found

    @cached_property
    def turn(self) -> int:
        """Position of the first backward."""
        return next(at for at, op in enumerate(self.ops) if op.kind is DeviceOpKind.BACKWARD)

    @cached_property
    def rest(self) -> list[int]:
        """Time of each operation and all behind it."""
        ends: list[int] = np.cumsum(self.time[::-1])[::-1].tolist()
        return ends

    @property
    def compute(self) -> int:
        """Time of all operations: no transfers make it shorter."""
        return int(self.time.sum())

    @property
    def peak(self) -> int:
        """Bytes with nothing offloaded."""
        return int(self.need.max())

    @property
    def least(self) -> int:
        """The smallest budget: all that may be away is away at each operation (O3)."""
        return int((self.need - self.leavable).max())


def compute_order(costs: Costs, base: DeviceSchedule) -> ComputeOrder:
    """What may leave during `base`, an allowed schedule without transfers (O1)."""
    device = DeviceState(costs)
    turn = next(at for at, op in enumerate(base.ops) if op.kind is DeviceOpKind.BACKWARD)
    need: list[int] = []
    held: list[int] = []
    last: dict[int, int] = {}
    due: dict[int, int] = {}
    # Bytes of each unit before its last use ahead of the turn, and from there on.
    before: dict[int, int] = {}
    after: dict[int, int] = {}
    for at, op in enumerate(base.ops):
        need.append(device.during(op))
        used = _uses(op)
        for unit in used:
            if at < turn:
                last[unit], before[unit] = at, device.size(unit)
            else:
                due.setdefault(unit, at)
        device.apply(op)
        held.append(device.settled)
        if at < turn:
            after.update({unit: device.size(unit) for unit in used})
    units = [
        OffloadUnit(unit, after[unit], at + (before[unit] != after[unit]), at + 1, due[unit])
        for unit, at in last.items()
        if after[unit] and due.get(unit, 0) > turn
    ]
    units.sort(key=lambda unit: unit.index)
    times = [costs.time(op) for op in base.ops]
    return ComputeOrder(
        costs.layers,
        costs.static,
        base.ops,
        np.array(need, dtype=np.int64),
        np.array(held, dtype=np.int64),
        np.array(times, dtype=np.int64),
        tuple(units),
    )


def _uses(op: DeviceOp) -> tuple[int, ...]:
    """Units that an operation reads, makes or gives up."""
    return (op.index, op.index + 1) if op.computes else (op.index,)
