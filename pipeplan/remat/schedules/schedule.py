"""The one vocabulary of rematerialization and offloading, and its text form.

A schedule is a list of operations that one device issues in order; docs/reference/remat-rules.md
§2 defines each.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pipeplan.errors import InputError
from pipeplan.units import shown

_HEADER = "pipeplan-remat/1"
_MAX_LAYERS = 100_000


class DeviceOpKind(StrEnum):
    """What an operation does; its index is a layer (F, B) or a boundary (the others)."""

    KEEP_ALL = "F_all"
    """Forward for the backward: the layer's tape stays, the input shrinks to the tape's part."""
    KEEP_INPUT = "F_ck"
    """Forward whose input stays in full, to start from it again; no tape."""
    KEEP_NOTHING = "F_none"
    """Forward that gives its input up; no tape."""
    BACKWARD = "B"
    FREE = "free"
    """Give up the full tensor of a boundary; what tapes keep of it stays."""
    OFFLOAD = "offload"
    """Copy a unit to the host, behind all transfers before; its bytes go when the copy ends."""
    PREFETCH = "prefetch"
    """Copy a unit back, behind all transfers before; its bytes come when the copy begins."""
    WAIT = "wait"
    """Compute on only once the last transfer of a unit has ended, and so all before it."""


FORWARDS = (DeviceOpKind.KEEP_ALL, DeviceOpKind.KEEP_INPUT, DeviceOpKind.KEEP_NOTHING)


@dataclass(frozen=True, order=True)
class DeviceOp:
    """One operation; `index` is a layer of a forward or backward, else a boundary."""

    kind: DeviceOpKind
    index: int

    def __str__(self) -> str:
        return f"{self.kind} {self.index}"

    @property
    def computes(self) -> bool:
        """Whether it takes time of the device: a forward or a backward."""
        return self.kind in FORWARDS or self.kind is DeviceOpKind.BACKWARD


@dataclass(frozen=True)
class DeviceSchedule:
    """Operations in the order in which the device issues them, for a chain of `layers` layers."""

    layers: int
    ops: tuple[DeviceOp, ...]

    def to_text(self) -> str:
        """A header, then one operation a line."""
        return "\n".join([f"{_HEADER} {self.layers}", *map(str, self.ops)]) + "\n"

    @classmethod
    def from_text(cls, text: str, where: str = "schedule") -> DeviceSchedule:
        """The schedule in `text`; `where` names it in errors.

        Raises:
            InputError: if a line is no operation, or an index lies outside the chain.
        """
        lines = text.splitlines()
        if not lines or lines[0].split(" ")[0] != _HEADER:
            found = shown(lines[0] if lines else "")
            raise InputError(f"{where}, line 1: got {found}, need '{_HEADER} LAYERS'")
        layers = _number(lines[0], 1, _MAX_LAYERS, f"{where}, line 1")
        ops = tuple(
            _op(line, layers, f"{where}, line {number}")
            for number, line in enumerate(lines[1:], start=2)
        )
        return cls(layers, ops)


def _op(line: str, layers: int, where: str) -> DeviceOp:
    known = {str(kind): kind for kind in DeviceOpKind}
    kind = known.get(line.split(" ")[0])
    if kind is None:
        raise InputError(
            f"{where}: got {shown(line)}, need one of {', '.join(known)} and an index"
        )
    return DeviceOp(kind, _number(line, 0, layers - DeviceOp(kind, 0).computes, where))


def _number(line: str, least: int, most: int, where: str) -> int:
    words = line.split(" ")
    last = words[-1]
    plain = last.isascii() and last.isdigit() and (last == "0" or last[0] != "0")
    if len(words) != 2 or not plain or len(last) > 9 or not least <= int(last) <= most:
        raise InputError(
            f"{where}: got {shown(line)}, need one integer from {least} to {most} behind the word"
        )
    return int(last)
