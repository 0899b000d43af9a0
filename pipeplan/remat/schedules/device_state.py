"""What is on the device between two operations, and whether the next one is allowed.

The rules (D1)-(D8) and the bytes (R1)-(R4) of docs/reference/remat-rules.md; memory follows from
the order of the operations alone, never from their times.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from pipeplan.remat.schedules.costs import Costs
from pipeplan.remat.schedules.host_link import Transfer, TransferQueue
from pipeplan.remat.schedules.schedule import FORWARDS, DeviceOp, DeviceOpKind


class UnitLocation(StrEnum):
    """Where the bytes of a unit are."""

    DEVICE = "on the device"
    LEAVING = "on its way to the host"
    HOST = "on the host"
    COMING = "on its way back"


_HERE = (UnitLocation.DEVICE, UnitLocation.LEAVING)


@dataclass
class DeviceState:
    """The state of one device: full boundaries, tapes, gradient, where each unit is.

    Unit b is all that is kept of boundary b and of the tape of layer b - 1 beside its boundaries.
    """

    costs: Costs
    duplex: bool = False
    full: set[int] = field(default_factory=lambda: {0})
    tapes: set[int] = field(default_factory=set)
    places: dict[int, UnitLocation] = field(default_factory=dict)
    pending: int = -1
    """The layer whose backward comes next."""
    unit_bytes: list[int] = field(default_factory=list)
    settled: int = 0
    """Bytes on the device that no transfer touches, the gradient and static bytes included."""
    twice: int = 0
    """Bytes that units count more than once (R5)."""
    queue: TransferQueue = field(init=False)
    host: dict[int, int] = field(default_factory=dict)
    """Bytes reserved on the host for each unit."""

    def __post_init__(self) -> None:
        self.queue = TransferQueue(self.duplex)
        self.pending = self.costs.layers - 1
        self.unit_bytes = [0] * (self.costs.layers + 1)
        self.settled = self.costs.static
        self._recount(0)

    def place(self, unit: int) -> UnitLocation:
        """Where `unit` is."""
        return self.places.get(unit, UnitLocation.DEVICE)

    def size(self, unit: int) -> int:
        """Bytes of `unit`, wherever it is."""
        c = self.costs
        own = c.saved[unit - 1] if unit - 1 in self.tapes else 0
        if unit in self.full:
            return own + c.boundary[unit]
        return own + c.kept(unit, before=unit - 1 in self.tapes, behind=unit in self.tapes)

    def _recount(self, unit: int) -> None:
        now = self.size(unit) if self.place(unit) is UnitLocation.DEVICE else 0
        self.settled += now - self.unit_bytes[unit]
        self.unit_bytes[unit] = now

    def refusal(self, op: DeviceOp) -> str | None:
        """Why `op` may not be issued now; None where it may."""
        if op.kind in FORWARDS:
            return self._refuse_forward(op)
        if op.kind is DeviceOpKind.BACKWARD:
            return self._refuse_backward(op.index)
        return self._refuse_move(op)

    def _refuse_forward(self, op: DeviceOp) -> str | None:
        layer = op.index
        if layer not in self.full or self.place(layer) not in _HERE:
            return f"needs the full input at boundary {layer}, which is not on the device"
        if layer in self.tapes:
            return f"layer {layer} has been run for its backward already"
        if self.size(layer + 1) or self.place(layer + 1) is not UnitLocation.DEVICE:
            return f"boundary {layer + 1} is there already"
        if layer > self.pending:
            return f"the backward of layer {layer} is over"
        if self.place(layer) is UnitLocation.LEAVING and self._shrinks(op):
            return f"gives up boundary {layer} while it is copied to the host"
        return None

    def _shrinks(self, op: DeviceOp) -> bool:
        """Whether `op` gives up a part of its input."""
        kept = 0
        if op.kind is DeviceOpKind.KEEP_ALL:
            kept = self.costs.kept(op.index, before=op.index - 1 in self.tapes, behind=True)
        return op.kind is not DeviceOpKind.KEEP_INPUT and kept < self.costs.boundary[op.index]

    def _refuse_backward(self, layer: int) -> str | None:
        if layer != self.pending:
            return f"the next backward is that of layer {self.pending}"
        if layer not in self.tapes:
            return f"layer {layer} has no tape"
        for unit in (layer, layer + 1):
            if self.place(unit) not in _HERE:
                return f"needs unit {unit}, which is {self.place(unit)}"
        if self.place(layer + 1) is UnitLocation.LEAVING:
            return f"gives up unit {layer + 1} while it is copied to the host"
        return None

    def _refuse_move(self, op: DeviceOp) -> str | None:
        unit, place = op.index, self.place(op.index)
        if op.kind is DeviceOpKind.FREE:
            return (
                None if unit in self.full and place is UnitLocation.DEVICE else "nothing to free"
            )
        if op.kind is DeviceOpKind.OFFLOAD:
            return (
                None
                if self.size(unit) and place is UnitLocation.DEVICE
                else f"unit is {place} or empty"
            )
        if op.kind is DeviceOpKind.PREFETCH:
            return (
                None if place in (UnitLocation.HOST, UnitLocation.LEAVING) else f"unit is {place}"
            )
        return (
            None
            if place in (UnitLocation.LEAVING, UnitLocation.COMING)
            else "no transfer to wait for"
        )

    def during(self, op: DeviceOp) -> int:
        """Bytes on the device while `op` runs (R3)."""
        c, layer = self.costs, op.index
        if op.kind is DeviceOpKind.PREFETCH:
            coming = TransferQueue(self.duplex, [*self.queue.pending, Transfer(layer, out=False)])
            return self.settled + coming.most(self.size)
        held = self.settled + self.queue.most(self.size, used=(layer,) if op.computes else ())
        held -= self.twice
        if op.kind is DeviceOpKind.KEEP_ALL:
            return held + c.saved[layer] + c.forward_work[layer] + c.boundary[layer + 1]
        if op.kind in FORWARDS:
            return held + c.light_work[layer] + c.boundary[layer + 1]
        if op.kind is DeviceOpKind.BACKWARD:
            own = c.gradient[layer] - c.incoming(layer)
            return held + own + c.backward_work[layer] + c.gradient_in(layer)
        return held

    def apply(self, op: DeviceOp) -> None:
        """The state after `op`, which `refusal` allows."""
        index = op.index
        if op.kind in FORWARDS:
            self._forward(op)
        elif op.kind is DeviceOpKind.BACKWARD:
            self.tapes.discard(index)
            self.pending -= 1
            self.settled += self.costs.gradient_in(index) - self.costs.incoming(index)
            self.settled += self.costs.left[index] if self.costs.left else 0
            self._recount(index)
            self._recount(index + 1)
        elif op.kind is DeviceOpKind.FREE:
            self.full.discard(index)
            self._recount(index)
        elif op.kind is DeviceOpKind.WAIT:
            self._end(index)
        else:
            self._issue(index, op.kind is DeviceOpKind.OFFLOAD)
        if self.costs.storages:
            self.twice = self._counted_twice()

    def _counted_twice(self) -> int:
        own = sum(self.costs.saved[layer] for layer in self.tapes)
        return (
            sum(self.unit_bytes)
            - own
            - sum(
                storage.size
                for storage in self.costs.storages
                if storage.boundaries & self.full or storage.tapes & self.tapes
            )
        )

    def _forward(self, op: DeviceOp) -> None:
        layer = op.index
        if op.kind is DeviceOpKind.KEEP_ALL:
            self.tapes.add(layer)
        if op.kind is not DeviceOpKind.KEEP_INPUT:
            self.full.discard(layer)
        self.full.add(layer + 1)
        self._recount(layer)
        self._recount(layer + 1)

    def _issue(self, unit: int, out: bool) -> None:
        self.queue.issue(Transfer(unit, out))
        self.places[unit] = UnitLocation.LEAVING if out else UnitLocation.COMING
        if out:
            self.host[unit] = self.size(unit)
        self._recount(unit)

    def _end(self, unit: int) -> None:
        for transfer in self.queue.end(unit):
            if transfer.out and self.place(transfer.unit) is UnitLocation.LEAVING:
                self.places[transfer.unit] = UnitLocation.HOST
            elif not transfer.out:
                del self.places[transfer.unit], self.host[transfer.unit]
            self._recount(transfer.unit)
