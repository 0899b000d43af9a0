"""What one device does for one micro-batch, instruction by instruction, and its text form.

The instructions are those of docs/reference/device-programs.md; indices are those of an
`OperatorGraph`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from pipeplan.errors import InputError
from pipeplan.units import shown

_HEADER = "pipeplan-device-program/1"


class InstructionKind(StrEnum):
    """What it does; its index is an operation (run, host), a storage, or nothing (marks)."""

    RUN = "run"
    """Execute an operation: its storages come."""
    FREE = "free"
    """Give a storage up on the device."""
    OFFLOAD = "offload"
    """Copy a storage to the host, behind all copies that way; its bytes go when the copy ends."""
    COPY = "copy"
    """Copy a storage to the host, behind all copies that way; it stays on the device, too."""
    PREFETCH = "prefetch"
    """Copy a storage back, behind all copies that way; its bytes come when the copy begins."""
    WAIT = "wait"
    """Go on only once the last copy of a storage has ended."""
    ACCUMULATE = "accumulate"
    """Add a weight gradient to its targets' gradients."""
    UPDATE = "update"
    """Copy a new value into the buffers that are its targets."""
    HOST = "host"
    """Execute an update on the host, behind all that the host executes."""
    END_F = "end F"
    """The forward's outputs are there."""
    END_I = "end I"
    """The gradients of the inputs are there."""


MARKS = (InstructionKind.END_F, InstructionKind.END_I)


@dataclass(frozen=True, slots=True, order=True)
class Instruction:
    """One instruction."""

    kind: InstructionKind
    index: int = 0

    def __str__(self) -> str:
        return str(self.kind) if self.kind in MARKS else f"{self.kind} {self.index}"


@dataclass(frozen=True, slots=True)
class DeviceProgram:
    """Instructions in the order in which the device issues them."""

    instructions: tuple[Instruction, ...]

    def to_text(self) -> str:
        """A header, then one instruction a line."""
        return "\n".join([_HEADER, *map(str, self.instructions)]) + "\n"

    @classmethod
    def of(cls, instructions: Iterable[tuple[InstructionKind, int]]) -> DeviceProgram:
        """The program of pairs of kind and index."""
        return cls(tuple(Instruction(*each) for each in instructions))

    @classmethod
    def from_text(cls, text: str, where: str = "program") -> DeviceProgram:
        """The program in `text`; `where` names it in errors.

        Raises:
            InputError: if a line is no instruction.
        """
        lines = text.splitlines()
        if not lines or lines[0] != _HEADER:
            found = shown(lines[0] if lines else "")
            raise InputError(f"{where}, line 1: got {found}, need '{_HEADER}'")
        return cls(
            tuple(
                _instruction(line, f"{where}, line {number}")
                for number, line in enumerate(lines[1:], start=2)
            )
        )


def _instruction(line: str, where: str) -> Instruction:
    for mark in MARKS:
        if line == mark:
            return Instruction(mark)
    word, _, last = line.partition(" ")
    kind = next((each for each in InstructionKind if each == word), None)
    if kind is None:
        known = ", ".join(InstructionKind)
        raise InputError(f"{where}: got {shown(line)}, need one of {known}")
    plain = last.isascii() and last.isdigit() and (last == "0" or last[0] != "0")
    if not plain or len(last) > 9:
        raise InputError(f"{where}: got {shown(line)}, need one integer behind the word")
    return Instruction(kind, int(last))
