"""The device program of an order of operations."""

from __future__ import annotations

from collections.abc import Iterator

from pipeplan.device_program import DeviceProgram, InstructionKind
from pipeplan.operator_graph import Phase, StorageKind
from pipeplan.remat.graph.ledger import END_F, Ledger, Order
from pipeplan.remat.graph.orders import frees


def program(ledger: Ledger, order: Order) -> DeviceProgram:
    """The device program of an order: runs, frees, marks, and what is added or copied once."""
    return DeviceProgram.of(_instructions(ledger, order))


def _instructions(ledger: Ledger, order: Order) -> Iterator[tuple[InstructionKind, int]]:
    going, added = frees(ledger, order), _Added(ledger)
    end = _end_of_inputs(ledger, order)
    for position, at in enumerate(order):
        if at == END_F:
            yield from added.before_end()
            yield InstructionKind.END_F, 0
            yield from added.behind_end()
        elif at >= 0:
            yield InstructionKind.RUN, at
            yield from added.run(at)
        if position == end:
            yield InstructionKind.END_I, 0
        for storage in (*going.read[position], *going.made[position]):
            yield InstructionKind.FREE, storage


class _Added:
    """What is added to gradients, behind the end of the forward, and copied into buffers."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.left = {*ledger.graph.accumulated, *ledger.graph.updated}
        self.behind = False

    def run(self, at: int) -> Iterator[tuple[InstructionKind, int]]:
        """At the first run of an operation."""
        for storage in self.ledger.writes[at]:
            if storage not in self.left:
                continue
            new = self.ledger.graph.storages[storage].kind is StorageKind.NEW_BUFFER
            if new and self.ledger.updated_at_once(storage):
                yield from self._add(InstructionKind.UPDATE, storage)
            elif not new and self.behind:
                yield from self._add(InstructionKind.ACCUMULATE, storage)

    def before_end(self) -> Iterator[tuple[InstructionKind, int]]:
        for storage in self.ledger.graph.updated:
            if storage in self.left:
                yield from self._add(InstructionKind.UPDATE, storage)

    def behind_end(self) -> Iterator[tuple[InstructionKind, int]]:
        self.behind = True
        for storage in (*self.ledger.outputs, *self.ledger.tangents):
            if storage in self.left:
                yield from self._add(InstructionKind.ACCUMULATE, storage)

    def _add(self, kind: InstructionKind, storage: int) -> Iterator[tuple[InstructionKind, int]]:
        self.left.discard(storage)
        yield kind, storage


def _end_of_inputs(ledger: Ledger, order: Order) -> int:
    """Where the last entry runs that is no weight gradient or makes an input's gradient."""
    operations, back = ledger.graph.operations, set(ledger.handed_back)
    return max(
        position
        for position, at in enumerate(order)
        if at < 0
        or operations[at].phase is not Phase.WEIGHT_GRADIENT
        or back.intersection(ledger.writes[at])
    )
