"""What one device computes for one micro-batch: operations, and the storages they read and write.

A *storage* is one piece of memory; it is counted once, however many tensors show it. An
*operation* is a forward, an input gradient (I) or a weight gradient (W) of an operator, a layer or
a block, or an update (U) of parameters. Times are integer ns, sizes integer bytes.
docs/reference/device-programs.md is the contract.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
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
        self._check_phases()
        comes = self._comes()
        self._check_reads(comes)
        forwards = self.forwards
        self._check_handed("outputs", self.outputs, comes, forwards, "no forward")
        self._check_handed("input_gradients", self.input_gradients, comes, self._ends, "nothing")
        for storage, each in enumerate(self.storages):
            where = f"storages[{storage}]"
            if storage not in comes:
                raise ValueError(
                    f"{where}: got one of kind {each.kind} that no operation makes; need it in the"
                    " writes of one, or left out"
                )
            _check_targets(each, where)
            if each.kind is StorageKind.NEW_BUFFER and comes[storage] >= forwards:
                raise ValueError(
                    f"{where}: got a new buffer that no forward makes, need one that does"
                )
        return self

    def _check_reads(self, comes: dict[int, int]) -> None:
        """Everything is there when it is read, old values of buffers too.

        Raises:
            ValueError: if one is not.
        """
        changed = {name for storage in self.updated for name in self.storages[storage].targets}
        for index, (turn, operation) in enumerate(self._turns()):
            where = f"operations[{index}].reads"
            for storage in operation.reads:
                self._check_index(storage, where)
                each = self.storages[storage]
                if comes.get(storage, self._ends) >= turn:
                    raise ValueError(f"{where}: got storage {storage}, {self._late(storage)}")
                old = each.kind is StorageKind.BUFFER and each.name in changed
                if old and turn > index:
                    raise ValueError(
                        f"{where}: got storage {storage}, a buffer which has new values behind"
                        " the forwards; need a storage with what the backward is to read"
                    )

    def _check_handed(
        self, name: str, handed: tuple[int, ...], comes: dict[int, int], before: int, who: str
    ) -> None:
        """What the caller gets comes before he gets it.

        Raises:
            ValueError: if it does not.
        """
        for storage in handed:
            self._check_index(storage, name)
            if comes.get(storage, self._ends) >= before:
                maker = who if storage in comes else "nothing"
                raise ValueError(f"{name}: got storage {storage}, which {maker} makes")

    @property
    def _ends(self) -> int:
        """A place behind all operations."""
        return len(self.operations) + 1

    def _turns(self) -> Iterator[tuple[int, Operation]]:
        """Operations with their places: tangents come between forwards and backwards."""
        forwards = self.forwards
        for index, operation in enumerate(self.operations):
            yield index + (index >= forwards), operation

    def _comes(self) -> dict[int, int]:
        """By storage the place where it first comes, -1 where it is there before all.

        Raises:
            ValueError: if an operation writes what it may not, or a storage twice.
        """
        comes = {i: -1 for i, each in enumerate(self.storages) if each.kind in GIVEN}
        tangents = (i for i in comes if self.storages[i].kind is StorageKind.TANGENT)
        comes |= dict.fromkeys(list(tangents), self.forwards)
        for index, (turn, operation) in enumerate(self._turns()):
            where = f"operations[{index}].writes"
            for storage, times in Counter(operation.writes).items():
                self._check_index(storage, where)
                self._check_written(operation, storage, where)
                if times > 1:
                    raise ValueError(f"{where}: got storage {storage} twice, need it once")
                comes.setdefault(storage, turn)
        return comes

    def _late(self, storage: int) -> str:
        """Why a storage cannot be read yet."""
        if self.storages[storage].kind is StorageKind.TANGENT:
            return "a tangent, which comes behind the forwards; need what is there before"
        return "which nothing before makes; need operations in an order in which they may run"

    def _check_phases(self) -> None:
        """Forwards come first.

        Raises:
            ValueError: if one does not.
        """
        for index, operation in enumerate(self.operations[self.forwards :], self.forwards):
            if operation.phase is Phase.FORWARD:
                raise ValueError(
                    f"operations[{index}].phase: got F behind I or W, need forwards first"
                )

    def _check_written(self, operation: Operation, storage: int, where: str) -> None:
        """Updates write what stays, other operations what is not given.

        Raises:
            ValueError: if one does not.
        """
        kind, update = self.storages[storage].kind, operation.phase is Phase.UPDATE
        if update and kind not in PERMANENT:
            raise ValueError(
                f"{where}: got storage {storage} of kind {kind}, need of an update"
                f" one of {', '.join(PERMANENT)}"
            )
        if not update and kind in GIVEN:
            raise ValueError(
                f"{where}: got storage {storage} of kind {kind}, need one that operations make"
            )

    def _check_index(self, storage: int, where: str) -> None:
        if storage >= len(self.storages):
            raise ValueError(
                f"{where}: got storage {storage}, need one below {len(self.storages)}"
            )


def _check_targets(storage: Storage, where: str) -> None:
    """What is made anew is added to gradients or copied into buffers, what stays is not.

    Raises:
        ValueError: if it is.
    """
    if storage.targets and storage.kind in (*PERMANENT, StorageKind.INPUT):
        raise ValueError(
            f"{where}.targets: got some of kind {storage.kind}, need none of what stays"
        )
    if storage.kind is StorageKind.NEW_BUFFER and not storage.targets:
        raise ValueError(
            f"{where}.targets: got none of a new buffer, need the buffers that it is copied into"
        )
