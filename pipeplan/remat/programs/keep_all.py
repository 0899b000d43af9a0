"""The program without a plan: every operation once, every storage freed at its latest use."""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum

from pipeplan.device_program import DeviceProgram, Instruction, InstructionKind
from pipeplan.operator_graph import PERMANENT, OperatorGraph, Phase, StorageKind


def keep_all(graph: OperatorGraph) -> DeviceProgram:
    """Runs the operations of `graph` in their order; nothing runs twice, nothing leaves.

    A buffer is updated once the last forward that reads it has run (A4), a weight gradient is
    added once it is there.
    """
    moments = sorted(_KeepAll(graph).moments())
    return DeviceProgram(tuple(instruction for _, _, instruction in moments))


class _Rank(IntEnum):
    """Order of what happens at one operation."""

    RUN = 0
    UPDATE = 1
    FREE = 2
    END_F = 3
    ACCUMULATE = 4
    END_I = 5
    FREE_HANDED_ON = 6
    """Of outputs, tangents and what is accumulated."""


_Moment = tuple[int, _Rank, Instruction]
"""An operation (-1: before all), and what happens there."""


class _KeepAll:
    def __init__(self, graph: OperatorGraph) -> None:
        self._graph = graph
        self._turn = graph.forwards - 1
        self._made: dict[int, int] = {}
        """Index of the operation that first makes a storage."""
        self._read: dict[int, int] = {}
        """Index of the operation that reads it last."""
        for index, operation in enumerate(graph.operations):
            self._read.update(dict.fromkeys(operation.reads, index))
            for storage in operation.writes:
                self._made.setdefault(storage, index)

    def moments(self) -> Iterator[_Moment]:
        """All instructions, in any order."""
        graph = self._graph
        for index in range(len(graph.operations)):
            yield index, _Rank.RUN, Instruction(InstructionKind.RUN, index)
        yield self._turn, _Rank.END_F, Instruction(InstructionKind.END_F)
        yield self._end_of_inputs(), _Rank.END_I, Instruction(InstructionKind.END_I)
        for storage in graph.updated:
            place = self._update_place(storage)
            yield place, _Rank.UPDATE, Instruction(InstructionKind.UPDATE, storage)
        for storage in graph.accumulated:
            place = max(self._made.get(storage, -1), self._turn)
            yield place, _Rank.ACCUMULATE, Instruction(InstructionKind.ACCUMULATE, storage)
        yield from self._frees()

    def _update_place(self, storage: int) -> int:
        """Behind the last forward that reads one of its buffers."""
        storages = self._graph.storages
        targets = storages[storage].targets
        readers = (
            index
            for index, operation in enumerate(self._graph.operations[: self._turn + 1])
            if any(storages[each].name in targets for each in operation.reads)
        )
        return max([self._made[storage], *readers])

    def _frees(self) -> Iterator[_Moment]:
        graph = self._graph
        handed_on = {*graph.outputs, *graph.accumulated}
        stay = (*PERMANENT, StorageKind.INPUT)
        for storage, each in enumerate(graph.storages):
            if each.kind in stay or storage in graph.input_gradients:
                continue
            place = max(self._made.get(storage, -1), self._read.get(storage, -1))
            late = storage in handed_on or each.kind is StorageKind.TANGENT
            if late:
                place = max(place, self._turn)
            elif each.kind is StorageKind.NEW_BUFFER:
                place = max(place, self._update_place(storage))
            rank = _Rank.FREE_HANDED_ON if late else _Rank.FREE
            yield place, rank, Instruction(InstructionKind.FREE, storage)

    def _end_of_inputs(self) -> int:
        """The operation behind which all gradients of inputs are there."""
        graph = self._graph
        needed = [self._made.get(each, -1) for each in graph.input_gradients] or [
            index
            for index, each in enumerate(graph.operations)
            if each.phase is Phase.INPUT_GRADIENT
        ]
        return max([*needed, self._turn])
