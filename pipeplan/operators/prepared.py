"""A device program, prepared for passes: what each of its steps calls, and what passes share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from pipeplan.device_program import DeviceProgram, Instruction, InstructionKind
from pipeplan.errors import InputError
from pipeplan.operator_graph import PERMANENT, OperatorGraph, StorageKind
from pipeplan.operators.captured import Captured
from pipeplan.operators.memory import Filled, filler, views_of
from pipeplan.pinned import PinnedPool
from pipeplan.remat.programs import judge

_ENDS = (InstructionKind.PREFETCH, InstructionKind.WAIT, InstructionKind.FREE)


@dataclass(frozen=True, slots=True)
class PreparedInstruction:
    """An instruction, and what its last reads mean for copies that are under way."""

    kind: InstructionKind
    index: int
    used_later: bool = False
    """Of an offload: whether an operation reads the storage before its copy is waited for."""
    unused: tuple[int, ...] = ()
    """Storages on their way out that nothing reads behind this step."""


class PreparedProgram:
    """All that the passes of one program share; nothing here holds the module."""

    def __init__(self, captured: Captured, program: DeviceProgram) -> None:
        """Takes both apart.

        Raises:
            InputError: if the program breaks a rule of the judge, or offloads parameters, which
                the module holds, too.
        """
        found = judge(captured.graph, program)
        if found.violations:
            raise InputError(
                f"device program: {found.violations[0]}. Plan the module again, or correct the"
                " program."
            )
        for each in program.instructions:
            _check_copy(captured, each)
        operations = captured.graph.operations
        self.captured = captured
        self.tasks = tuple(OperationCall.of(captured, index) for index in range(len(operations)))
        self.views = views_of(captured)
        self.forward, self.backward = _parts(captured, program)
        self.pinned = PinnedPool()
        self.moves = any(each.kind is InstructionKind.OFFLOAD for each in program.instructions)
        runs = Counter(
            each.index for each in program.instructions if each.kind is InstructionKind.RUN
        )
        self.again = frozenset(
            index for index, count in runs.items() if count > 1 and operations[index].random
        )


@dataclass(frozen=True, slots=True)
class OperationCall:
    """An operation, prepared for runs."""

    function: Callable[..., Any]
    fill: Filled
    several: bool
    """Whether it returns several results."""
    kept: tuple[tuple[int, int, int], ...]
    """Place among the results, value and storage of each that is kept."""
    writes: tuple[int, ...]
    random: bool
    device: torch.device

    @classmethod
    def of(cls, captured: Captured, index: int) -> OperationCall:
        """Of operation `index`."""
        operation, computation = captured.graph.operations[index], captured.computations[index]
        return cls(
            function=computation.call.function,
            fill=filler(computation.call),
            several=computation.several,
            kept=tuple(
                (place, value, captured.values[value].storage)
                for place, value in enumerate(computation.results)
                if value is not None
            ),
            writes=operation.writes,
            random=operation.random,
            device=computation.device,
        )


def _check_copy(captured: Captured, instruction: Instruction) -> None:
    if instruction.kind is not InstructionKind.OFFLOAD:
        return
    storage = captured.graph.storages[instruction.index]
    if storage.kind in PERMANENT:
        raise InputError(
            f"device program: {instruction}: got {storage.kind} {storage.name!r}, need a storage"
            " that the module does not hold. Keep it on the device."
        )


def _parts(
    captured: Captured, program: DeviceProgram
) -> tuple[tuple[PreparedInstruction, ...], tuple[PreparedInstruction, ...]]:
    """What runs in the forward, and what in the backward.

    What is freed right behind the end of the forward goes before the caller has his turn.
    """
    lines = program.instructions
    end = lines.index(Instruction(InstructionKind.END_F)) + 1
    storages = captured.graph.storages
    while end < len(lines) and lines[end].kind is InstructionKind.FREE:
        if storages[lines[end].index].kind is StorageKind.TANGENT:
            break
        end += 1
    steps = tuple(_steps(captured.graph, lines))
    return steps[:end], steps[end:]


def _steps(graph: OperatorGraph, lines: tuple[Instruction, ...]) -> Iterator[PreparedInstruction]:
    """Finds, from the end on, which reads of a storage that is leaving are the last ones."""
    last_read: dict[int, int] = {}
    offloads: dict[int, int] = {}
    ended: dict[int, list[int]] = {}
    for place in range(len(lines) - 1, -1, -1):
        kind, index = lines[place].kind, lines[place].index
        if kind in _ENDS:
            last_read.pop(index, None)
        elif kind is InstructionKind.OFFLOAD:
            if index in last_read:
                offloads[place] = index
                ended.setdefault(last_read.pop(index), []).append(index)
        else:
            for storage in _read_by(graph, lines[place]):
                last_read.setdefault(storage, place)
    for place, each in enumerate(lines):
        unused = tuple(ended.get(place, ()))
        yield PreparedInstruction(each.kind, each.index, place in offloads, unused)


def _read_by(graph: OperatorGraph, line: Instruction) -> tuple[int, ...]:
    if line.kind is InstructionKind.RUN:
        return graph.operations[line.index].reads
    adds = line.kind in (InstructionKind.ACCUMULATE, InstructionKind.UPDATE)
    return (line.index,) if adds else ()
