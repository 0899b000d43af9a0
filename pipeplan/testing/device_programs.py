"""Programs that keep all rules, drawn at random or recomputing as told: for tests of judges.

They are allowed by construction, and far from the fastest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from random import Random

from pipeplan.device_program import DeviceProgram, Instruction, InstructionKind
from pipeplan.operator_graph import PERMANENT, OperatorGraph, Phase, StorageKind
from pipeplan.remat.programs import keep_all
from pipeplan.remat.programs.device_memory import DeviceMemory
from pipeplan.remat.schedules.device_state import UnitLocation

Choice = Callable[[int], bool]
"""Whether to do something with a storage now."""


def recomputing(graph: OperatorGraph, kept: Choice) -> DeviceProgram:
    """Keeps of what forwards made, at the end of the forward, what `kept` says.

    The rest is computed again where a backward needs it, and stays until its last reader.
    """
    writer = _Writer(graph)
    stay = {*graph.outputs, *graph.updated}

    def drop(storage: int) -> bool:
        here = writer.turned or writer.read_by_forwards(storage) or storage in stay
        return not here and not kept(storage)

    return writer.program(drop)


def random_program(graph: OperatorGraph, random: Random, host: bool = False) -> DeviceProgram:
    """Frees and computes again, and with `host` offloads and prefetches, as `random` says."""
    share = 0.2 * random.random()
    away = 0.1 * random.random() if host else 0.0
    return _Writer(graph).program(
        drop=lambda _: random.random() < share,
        leave=lambda _: random.random() < away,
        known=lambda _: random.random() < 0.3,
    )


def _never(_: int) -> bool:
    return False


class _Writer:
    """Follows `keep_all`, without its frees; brings back what each instruction needs."""

    def __init__(self, graph: OperatorGraph) -> None:
        self._graph = graph
        self._memory = DeviceMemory(graph, duplex=False)
        self._lines: list[Instruction] = []
        self._plain = [
            each for each in keep_all(graph).instructions if each.kind is not InstructionKind.FREE
        ]
        self._left = Counter(s for each in self._plain for s in self._needs(each))
        self._forward_reads: Counter[int] = Counter()
        self._maker: dict[int, int] = {}
        self._again = {
            index
            for index, each in enumerate(graph.storages)
            if each.kind in (*PERMANENT, StorageKind.INPUT, StorageKind.RECEIVED)
            or each.kind is StorageKind.TANGENT
        }
        """What can be computed again, or is there to the end."""
        for index, operation in enumerate(graph.operations):
            if operation.phase is Phase.FORWARD:
                self._forward_reads.update(operation.reads)
            for storage in operation.writes:
                self._maker.setdefault(storage, index)
            if not operation.once and self._again.issuperset(operation.reads):
                self._again.update(operation.writes)

    @property
    def turned(self) -> bool:
        """Whether the forward has ended."""
        return InstructionKind.END_F in self._memory.ended

    def read_by_forwards(self, storage: int) -> bool:
        """Whether a forward that has not run yet reads `storage`."""
        return self._forward_reads[storage] > 0

    def program(
        self, drop: Choice, leave: Choice = _never, known: Choice = _never
    ) -> DeviceProgram:
        """The instructions.

        Args:
            drop: a storage that is needed later: to be computed again.
            leave: one that is needed later: to the host.
            known: one that is leaving: wait for the end of its copy.
        """
        for instruction in self._plain:
            needs = self._needs(instruction)
            self._bring(needs, exact=instruction.kind is not InstructionKind.RUN)
            if instruction.kind is InstructionKind.END_F:
                self._tidy(_never, _never, _never)
            self._emit(instruction)
            self._left.subtract(needs)
            if instruction.kind is InstructionKind.RUN and not self.turned:
                self._forward_reads.subtract(needs)
            self._tidy(drop, leave, known)
        self._clear()
        return DeviceProgram(tuple(self._lines))

    def _needs(self, instruction: Instruction) -> tuple[int, ...]:
        kind, graph = instruction.kind, self._graph
        if kind is InstructionKind.RUN:
            return graph.operations[instruction.index].reads
        if kind is InstructionKind.END_F:
            return graph.outputs
        return graph.input_gradients if kind is InstructionKind.END_I else (instruction.index,)

    def _emit(self, instruction: Instruction) -> None:
        refusal = self._memory.refusal(instruction)
        assert refusal is None, f"{instruction}: {refusal}"
        self._memory.apply(instruction)
        self._lines.append(instruction)

    def _do(self, kind: InstructionKind, storage: int) -> None:
        self._emit(Instruction(kind, storage))

    def _bring(self, storages: Iterable[int], *, exact: bool) -> None:
        """All of `storages` on the device; `exact`: not on their way out.

        Until nothing changes: a wait for one may end the way out of another one.
        """
        there = (UnitLocation.DEVICE,) if exact else (UnitLocation.DEVICE, UnitLocation.LEAVING)
        wanted = tuple(storages)
        while missing := [s for s in wanted if self._memory.places.get(s) not in there]:
            storage = missing[0]
            if storage not in self._memory.places:
                self._again_made(storage)
            else:
                self._do(InstructionKind.PREFETCH, storage)
                self._do(InstructionKind.WAIT, storage)

    def _again_made(self, storage: int) -> None:
        operation = self._maker[storage]
        reads = self._graph.operations[operation].reads
        self._bring(reads, exact=False)
        self._emit(Instruction(InstructionKind.RUN, operation))

    def _tidy(self, drop: Choice, leave: Choice, known: Choice) -> None:
        staying = self._staying()
        for storage, place in list(self._memory.places.items()):
            if storage in staying:
                continue
            if self._memory.places[storage] is UnitLocation.LEAVING and known(storage):
                self._do(InstructionKind.WAIT, storage)
            elif place is UnitLocation.DEVICE:
                self._part_with(storage, drop, leave)

    def _part_with(self, storage: int, drop: Choice, leave: Choice) -> None:
        given = self._graph.storages[storage].kind in (StorageKind.RECEIVED, StorageKind.TANGENT)
        needed = given or self._left[storage] > 0
        if not needed or (not given and storage in self._again and drop(storage)):
            self._do(InstructionKind.FREE, storage)
        elif leave(storage):
            self._do(InstructionKind.OFFLOAD, storage)

    def _staying(self) -> set[int]:
        """Storages that the program may not give up any more, or never could."""
        stay = {
            index
            for index, each in enumerate(self._graph.storages)
            if each.kind in (*PERMANENT, StorageKind.INPUT)
        }
        ended = InstructionKind.END_I in self._memory.ended
        return stay | set(self._graph.input_gradients) if ended else stay

    def _clear(self) -> None:
        staying = self._staying()
        for storage in list(self._memory.places):
            if storage not in staying:
                if self._memory.places[storage] is UnitLocation.LEAVING:
                    self._do(InstructionKind.WAIT, storage)
                self._do(InstructionKind.FREE, storage)
