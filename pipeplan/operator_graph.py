"""What one device computes for one micro-batch: operations, and the storages they read and write.

A *storage* is one piece of memory; it is counted once, however many tensors show it. An
*operation* is a forward, an input gradient (I) or a weight gradient (W) of an operator, a layer or
a block, or an update (U) of parameters. Times are integer ns, sizes integer bytes.
docs/reference/device-programs.md is the contract.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipeplan.document import Count, Document, Record, digest

MOST = 100_000
"""Storages, and operations, of a graph."""


class StorageKind(StrEnum):
    """Where a storage comes from and what it is for."""

    INPUT = "input"
    """There when the forward begins; the caller's, whose bytes stay."""
    RECEIVED = "received"
    """There when the forward begins; the device's own, whose bytes go when it is freed."""
    TANGENT = "tangent"
    """Gradient of an output, there when the backward begins."""
    PARAMETER = "parameter"
    """There all the time, as those of the next two kinds."""
    BUFFER = "buffer"
    OPTIMIZER = "optimizer state"
    ACTIVATION = "activation"
    """Made by a forward."""
    GRADIENT = "gradient"
    """Of an activation or an input; made by a backward."""
    WEIGHT_GRADIENT = "weight gradient"
    """One micro-batch's share, to be added to the gradients of `targets`."""
    NEW_BUFFER = "new buffer"
    """New values, to be copied into the buffers `targets`."""


GIVEN = (
    StorageKind.INPUT,
    StorageKind.RECEIVED,
    StorageKind.TANGENT,
    StorageKind.PARAMETER,
    StorageKind.BUFFER,
    StorageKind.OPTIMIZER,
)
"""Kinds of storages that no operation makes."""
PERMANENT = (StorageKind.PARAMETER, StorageKind.BUFFER, StorageKind.OPTIMIZER)
"""Kinds of storages that stay from one micro-batch to the next."""
ADDED = (StorageKind.WEIGHT_GRADIENT, StorageKind.NEW_BUFFER)
"""Kinds of storages that end up in something permanent, and are nothing else.

Gradients and tangents may have targets, too: that of a bias may be that of an activation.
"""


class Phase(StrEnum):
    """Which part of a micro-batch an operation belongs to."""

    FORWARD = "F"
    INPUT_GRADIENT = "I"
    WEIGHT_GRADIENT = "W"
    """Nothing but gradients of weights depends on it."""
    UPDATE = "U"
    """A step of the optimizer; what it writes are permanent storages, in place."""


class Storage(Record):
    """One piece of memory."""

    name: str
    bytes: Count
    kind: StorageKind
    targets: tuple[str, ...] = ()
    """Parameters whose gradients it is added to; of a new buffer, buffers it is copied into."""


class Operation(Record):
    """What runs as one; `reads` and `writes` are indices of storages."""

    name: str
    phase: Phase
    reads: tuple[Count, ...]
    writes: tuple[Count, ...]
    """Storages that it makes; all of them, each time it runs."""
    time_ns: Count
    workspace_bytes: Count = 0
    """What it takes beyond its storages while it runs."""
    random: bool = False
    """Whether it draws random numbers: run again, it must draw the same ones."""
    once: bool = False
    """Whether it may not run again, as what it reads has changed by then."""


class OperatorGraph(Document):
    """Storages and operations, these in an order in which they may run: forwards first."""

    format: Literal["pipeplan-operators/1"] = "pipeplan-operators/1"
    name: str
    storages: Annotated[tuple[Storage, ...], Field(max_length=MOST)]
    operations: Annotated[tuple[Operation, ...], Field(min_length=1, max_length=MOST)]
    outputs: tuple[Count, ...]
    """Storages that the caller gets at the end of the forward."""
    input_gradients: tuple[Count, ...] = ()
    """Storages that the caller gets at the end of the backward."""
    gradient_bytes: Count = 0
    """Of the gradients that weight gradients are added to; they are there all the time."""

    @property
    def forwards(self) -> int:
        """How many operations are forwards."""
        return sum(operation.phase is Phase.FORWARD for operation in self.operations)

    @property
    def static_bytes(self) -> int:
        """Bytes of what is there all the time: permanent storages, gradients of parameters."""
        permanent = sum(each.bytes for each in self.storages if each.kind in PERMANENT)
        return permanent + self.gradient_bytes

    @property
    def accumulated(self) -> tuple[int, ...]:
        """Storages that are added to gradients of parameters."""
        return tuple(
            index
            for index, each in enumerate(self.storages)
            if each.targets and each.kind is not StorageKind.NEW_BUFFER
        )

    @property
    def updated(self) -> tuple[int, ...]:
        """Storages that are copied into buffers."""
        return tuple(
            index
            for index, each in enumerate(self.storages)
            if each.kind is StorageKind.NEW_BUFFER
        )

    @property
    def compute_ns(self) -> int:
        """The time of all operations, each once, updates left out."""
        return sum(each.time_ns for each in self.operations if each.phase is not Phase.UPDATE)

    def structure_digest(self) -> str:
        """SHA-256 of what programs depend on: no name, no time; targets by their places.

        A program of one graph is one of every graph with this digest, and holds the same bytes.
        """
        places = {
            each.name: index for index, each in enumerate(self.storages) if each.kind in PERMANENT
        }
        return digest(
            {
                "storages": [
                    [each.bytes, each.kind, [places.get(name, -1) for name in each.targets]]
                    for each in self.storages
                ],
                "operations": [
                    [
                        each.phase,
                        list(each.reads),
                        list(each.writes),
                        each.workspace_bytes,
                        each.random,
                        each.once,
                    ]
                    for each in self.operations
                ],
                "outputs": list(self.outputs),
                "input_gradients": list(self.input_gradients),
                "gradient_bytes": self.gradient_bytes,
            }
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        there = {i for i, each in enumerate(self.storages) if each.kind in GIVEN}
        backward = False
        for index, operation in enumerate(self.operations):
            where = f"operations[{index}]"
            for storage in (*operation.reads, *operation.writes):
                self._check_index(storage, where)
            missing = next((each for each in operation.reads if each not in there), None)
            if missing is not None:
                raise ValueError(
                    f"{where}.reads: got storage {missing}, which nothing before makes; need"
                    " operations in an order in which they may run"
                )
            self._check_writes(operation, where)
            if backward and operation.phase is Phase.FORWARD:
                raise ValueError(f"{where}.phase: got F behind I or W, need forwards first")
            backward |= operation.phase is not Phase.FORWARD
            there.update(operation.writes)
        for name, handed in (("outputs", self.outputs), ("input_gradients", self.input_gradients)):
            for storage in handed:
                self._check_index(storage, name)
                if storage not in there:
                    raise ValueError(f"{name}: got storage {storage}, which nothing makes")
        return self

    def _check_writes(self, operation: Operation, where: str) -> None:
        """Updates write what stays, other operations what is not given.

        Raises:
            ValueError: if one does not.
        """
        update = operation.phase is Phase.UPDATE
        for storage in operation.writes:
            kind = self.storages[storage].kind
            if update and kind not in PERMANENT:
                raise ValueError(
                    f"{where}.writes: got storage {storage} of kind {kind}, need of an update"
                    f" one of {', '.join(PERMANENT)}"
                )
            if not update and kind in GIVEN:
                raise ValueError(
                    f"{where}.writes: got storage {storage} of kind {kind}, need one that"
                    " operations make"
                )

    def _check_index(self, storage: int, where: str) -> None:
        if storage >= len(self.storages):
            raise ValueError(
                f"{where}: got storage {storage}, need one below {len(self.storages)}"
            )
