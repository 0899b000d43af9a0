"""What is on the device between two instructions, and whether the next one is allowed.

The rules (A1)-(A11) and the bytes (B1)-(B4) of docs/reference/device-programs.md; memory follows
from the order of the instructions alone, never from their times. What updates read and write has
rules of its own, in `host_copies`.
"""

from __future__ import annotations

from pipeplan.device_program import Instruction, InstructionKind
from pipeplan.operator_graph import PERMANENT, OperatorGraph, Phase, StorageKind
from pipeplan.remat.programs.host_copies import CopiesOnHost
from pipeplan.remat.schedules.device_state import UnitLocation
from pipeplan.remat.schedules.host_link import Transfer, TransferQueue

_HERE = (UnitLocation.DEVICE, UnitLocation.LEAVING)
_CALLERS = "belongs to the caller"


class DeviceMemory:
    """The state of one device while it runs a program."""

    def __init__(
        self, graph: OperatorGraph, duplex: bool, copies: CopiesOnHost | None = None
    ) -> None:
        self.graph = graph
        self.copies = copies or CopiesOnHost(graph)
        self.places: dict[int, UnitLocation] = {}
        """Of the storages that have a value; an input that was freed has none for the program."""
        self.resident = graph.gradient_bytes
        """Bytes on the device that no copy touches."""
        self.host_bytes = sum(graph.storages[each].bytes for each in self.copies.buffers)
        self.ended: set[InstructionKind] = set()
        """Marks that were passed."""
        self._queue = TransferQueue(duplex)
        self._ran: set[int] = set()
        self._added: set[int] = set()
        self._updated_buffers: set[int] = set()
        self._sizes = [each.bytes for each in graph.storages]
        self._kinds = [each.kind for each in graph.storages]
        self._buffers = {
            each.name: index
            for index, each in enumerate(graph.storages)
            if each.kind is StorageKind.BUFFER
        }
        randoms = [i for i, each in enumerate(graph.operations) if each.random]
        self._randoms = dict(zip(randoms, [None, *randoms], strict=False))
        """Random operation -> the one that draws before it."""
        self._outputs, self._returned = set(graph.outputs), set(graph.input_gradients)
        self._inputs = self._of(StorageKind.INPUT, StorageKind.RECEIVED)
        self._permanent = self._of(*PERMANENT)
        begin = self.copies.begin
        for index in (*self._inputs, *begin.device):
            self._bring(index)
        self.places.update(dict.fromkeys(begin.host - begin.device, UnitLocation.HOST))

    def _of(self, *kinds: StorageKind) -> list[int]:
        return [index for index, kind in enumerate(self._kinds) if kind in kinds]

    def _bring(self, storage: int) -> None:
        self.places[storage] = UnitLocation.DEVICE
        self.resident += self._sizes[storage]

    def held(self, used: tuple[int, ...] = ()) -> int:
        """Bytes on the device now (B1), by the worst state of the copies (B3)."""
        if not self._queue.pending:
            return self.resident
        return self.resident + self._queue.most(self._moving, used)

    def _moving(self, storage: int) -> int:
        """Bytes of a queued storage that are not among the resident ones."""
        return 0 if storage in self.copies.staying else self._sizes[storage]

    def during(self, instruction: Instruction) -> int:
        """Bytes while a `run` runs (B2), or before another instruction."""
        if instruction.kind is not InstructionKind.RUN:
            return self.held()
        operation = self.graph.operations[instruction.index]
        in_place = operation.phase is Phase.UPDATE
        made = 0 if in_place else sum(self._sizes[each] for each in operation.writes)
        return self.held(operation.reads) + made + operation.workspace_bytes

    @property
    def saved(self) -> int:
        """Bytes now, less static ones, inputs and outputs (B5)."""
        others = {*self._outputs, *self._inputs, *self._permanent}
        here = sum(
            self._sizes[index]
            for index, place in self.places.items()
            if place is UnitLocation.DEVICE and index not in others
        )
        return here + self._queue.most(lambda each: 0 if each in others else self._sizes[each])

    def refusal(self, instruction: Instruction) -> str | None:
        """Why `instruction` may not be issued now, with its rule; None where it may."""
        kind, index = instruction.kind, instruction.index
        if kind is InstructionKind.RUN:
            return self._refuse_run(index)
        if kind is InstructionKind.HOST:
            return self.copies.refuse_update(index, self.places, on_host=True)
        if kind is InstructionKind.END_F:
            return self._refuse_end_of_forward()
        if kind is InstructionKind.END_I:
            return self._refuse_end_of_inputs()
        if index >= len(self._sizes):
            return f"(A1) the graph has storages 0 to {len(self._sizes) - 1}"
        if kind in (InstructionKind.ACCUMULATE, InstructionKind.UPDATE):
            return self._refuse_add(kind, index)
        if kind is InstructionKind.FREE:
            return self._refuse_free(index)
        if kind is InstructionKind.COPY:
            return self.copies.refuse_copy(index, self.places.get(index))
        return self._refuse_copy(kind, index)

    def _refuse_run(self, index: int) -> str | None:
        if index >= len(self.graph.operations):
            return f"(A1) the graph has operations 0 to {len(self.graph.operations) - 1}"
        operation = self.graph.operations[index]
        if operation.phase is Phase.UPDATE:
            return self.copies.refuse_update(index, self.places, on_host=False)
        for storage in operation.reads:
            if self.places.get(storage) not in _HERE:
                return f"(A2) reads storage {self._name(storage)}, which is {self._where(storage)}"
        if index in self._ran:
            return "(A3) runs a second time, need once" if operation.once else None
        changed = next((each for each in operation.reads if each in self._updated_buffers), None)
        if changed is not None:
            return f"(A4) reads buffer {self._name(changed)}, which has been updated already"
        earlier = self._randoms.get(index)
        if earlier is not None and earlier not in self._ran:
            return f"(A3) draws random numbers before operation {earlier}, need the graph's order"
        return self.copies.refuse_run(operation)

    def _refuse_free(self, index: int) -> str | None:
        place = self.places.get(index)
        if index in self.copies.states:
            return self.copies.refuse_free(index, place)
        if place not in (UnitLocation.DEVICE, UnitLocation.HOST):
            return f"(A5) storage {self._name(index)} is {self._where(index)}"
        if self._kinds[index] in PERMANENT:
            return f"(A5) storage {self._name(index)} stays from one micro-batch to the next"
        if index in self._returned and InstructionKind.END_I in self.ended:
            return f"(A10) storage {self._name(index)} {_CALLERS}"
        return None

    def _refuse_copy(self, kind: InstructionKind, index: int) -> str | None:
        place = self.places.get(index)
        if kind is InstructionKind.OFFLOAD:
            if index in self.copies.states:
                return f"(A6) storage {self._name(index)} is a state: copy it, then free it"
            if self._kinds[index] is StorageKind.INPUT:
                return f"(A6) storage {self._name(index)} {_CALLERS}"
            if index in self._returned and InstructionKind.END_I in self.ended:
                return f"(A10) storage {self._name(index)} {_CALLERS}"
            allowed: tuple[UnitLocation, ...] = (UnitLocation.DEVICE,)
        elif kind is InstructionKind.PREFETCH:
            allowed = (UnitLocation.HOST, UnitLocation.LEAVING)
        else:
            allowed = (UnitLocation.LEAVING, UnitLocation.COMING)
        stays = kind is InstructionKind.PREFETCH and index in self.copies.staying
        if place not in allowed or stays:
            return f"(A6) storage {self._name(index)} is {self._where(index)}"
        return None

    def _refuse_add(self, kind: InstructionKind, index: int) -> str | None:
        behind, is_update = InstructionKind.END_F in self.ended, kind is InstructionKind.UPDATE
        rule = "(A8)" if is_update else "(A7)"
        wanted = self._kinds[index] is StorageKind.NEW_BUFFER
        if wanted is not is_update or not self.graph.storages[index].targets:
            return f"{rule} storage {self._name(index)} has no such targets"
        if behind is is_update:
            return f"{rule} need it {'before' if is_update else 'behind'} the end of the forward"
        if index in self._added:
            return f"{rule} storage {self._name(index)} a second time, need once"
        if self.places.get(index) not in _HERE:
            return f"{rule} storage {self._name(index)} is {self._where(index)}"
        return None

    def _refuse_end_of_forward(self) -> str | None:
        if InstructionKind.END_F in self.ended:
            return "(A9) a second time, need once"
        for index in self._randoms:
            if index < self.graph.forwards and index not in self._ran:
                return f"(A3) operation {index} draws random numbers and has not run"
        return self._absent("(A9)", self._outputs) or self._not_added("(A8)", self.graph.updated)

    def _refuse_end_of_inputs(self) -> str | None:
        if InstructionKind.END_I in self.ended or InstructionKind.END_F not in self.ended:
            return "(A10) need it once, behind the end of the forward"
        return self._absent("(A10)", self._returned)

    def refuse_end(self) -> str | None:
        """What is missing or left where the program ends (A11)."""
        for mark in (InstructionKind.END_F, InstructionKind.END_I):
            if mark not in self.ended:
                return f"(A11) '{mark}' is missing"
        missing = self._not_added("(A7)", self.graph.accumulated)
        missing = missing or self.copies.refuse_end(self.places)
        if missing is not None:
            return missing
        kept = {*self._permanent, *self._returned, *self.copies.states}
        for index in self.places:
            if index not in kept and self._kinds[index] is not StorageKind.INPUT:
                return f"(A11) storage {self._name(index)} is still {self._where(index)}"
        return None

    def _absent(self, rule: str, storages: set[int] | list[int]) -> str | None:
        for each in sorted(storages):
            if self.places.get(each) is not UnitLocation.DEVICE:
                return f"{rule} storage {self._name(each)} is {self._where(each)}"
        return None

    def _not_added(self, rule: str, storages: tuple[int, ...]) -> str | None:
        left = next((each for each in storages if each not in self._added), None)
        return None if left is None else f"{rule} storage {self._name(left)} was never added"

    def _name(self, index: int) -> str:
        return f"{index} ({self.graph.storages[index].name})"

    def _where(self, index: int) -> str:
        return str(self.places.get(index, "not there"))

    def apply(self, instruction: Instruction) -> None:
        """The state after `instruction`, which `refusal` allows."""
        kind, index = instruction.kind, instruction.index
        if kind is InstructionKind.RUN:
            self._run(index)
        elif kind is InstructionKind.HOST:
            self.copies.ran(index, on_host=True)
        elif kind is InstructionKind.COPY:
            self._queue.issue(Transfer(index, out=True))
            self.copies.staying.add(index)
            self.places[index] = UnitLocation.LEAVING
        elif kind is InstructionKind.FREE:
            self._free(index)
        elif kind is InstructionKind.OFFLOAD:
            self._queue.issue(Transfer(index, out=True))
            self.resident -= self._sizes[index]
            self._hold_on_host(index, 1)
            self.places[index] = UnitLocation.LEAVING
        elif kind is InstructionKind.PREFETCH:
            self._queue.issue(Transfer(index, out=False))
            self.places[index] = UnitLocation.COMING
        elif kind is InstructionKind.WAIT:
            self._end(index)
        elif kind in (InstructionKind.ACCUMULATE, InstructionKind.UPDATE):
            self._add(index)
        else:
            self._mark(kind)

    def _run(self, index: int) -> None:
        self._ran.add(index)
        for storage in self.graph.operations[index].writes:
            if storage not in self.places:
                self._bring(storage)
        self.copies.ran(index)

    def _hold_on_host(self, index: int, sign: int) -> None:
        """The host takes a storage (1), or gives it up (-1); states have a place there always."""
        if index not in self.copies.buffers:
            self.host_bytes += sign * self._sizes[index]

    def _free(self, index: int) -> None:
        place = self.places.pop(index)
        if self.copies.given_up(index):
            self.places[index] = UnitLocation.HOST
        if place is UnitLocation.HOST:
            self._hold_on_host(index, -1)
        elif self._kinds[index] is not StorageKind.INPUT:
            self.resident -= self._sizes[index]

    def _end(self, index: int) -> None:
        for transfer in self._queue.end(index):
            unit = transfer.unit
            if not transfer.out:
                self._hold_on_host(unit, -1)
                self._bring(unit)
            elif unit in self.copies.staying:
                self.copies.copied(unit)
                self.places[unit] = UnitLocation.DEVICE
            elif self.places[unit] is UnitLocation.LEAVING:
                self.places[unit] = UnitLocation.HOST

    def _add(self, index: int) -> None:
        self._added.add(index)
        if self._kinds[index] is StorageKind.NEW_BUFFER:
            targets = self.graph.storages[index].targets
            self._updated_buffers.update(
                self._buffers[each] for each in targets if each in self._buffers
            )

    def _mark(self, kind: InstructionKind) -> None:
        self.ended.add(kind)
        if kind is InstructionKind.END_F:
            for index in self._of(StorageKind.TANGENT):
                self._bring(index)
