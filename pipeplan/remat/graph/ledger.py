"""The figures of a graph that its solvers need, and what an order of operations is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pipeplan.operator_graph import PERMANENT, OperatorGraph, StorageKind

END_F = -1
"""In an order: the end of the forward."""
START = -2
"""In an order: its begin, where storages come that are received."""

Order = tuple[int, ...]
"""Indices of operations as they run, with `END_F` once among them, and `START` before them where
the graph receives anything."""


@dataclass(frozen=True)
class Ledger:
    """The figures of a graph that solvers need, as plain integers.

    Attributes:
        graph: where they come from.
    """

    graph: OperatorGraph

    @cached_property
    def size(self) -> list[int]:
        """Bytes of each storage that comes and goes; 0 of one that stays."""
        stays = (*PERMANENT, StorageKind.INPUT)
        return [0 if each.kind in stays else each.bytes for each in self.graph.storages]

    @cached_property
    def staying(self) -> frozenset[int]:
        """Storages that are there all the time: inputs and permanent ones."""
        stays = (*PERMANENT, StorageKind.INPUT)
        return frozenset(i for i, each in enumerate(self.graph.storages) if each.kind in stays)

    @cached_property
    def reads(self) -> list[tuple[int, ...]]:
        """Per operation the storages it reads that come and go, each once."""
        return [
            tuple(dict.fromkeys(s for s in each.reads if s not in self.staying))
            for each in self.graph.operations
        ]

    @cached_property
    def writes(self) -> list[tuple[int, ...]]:
        """Per operation the storages it makes."""
        return [tuple(dict.fromkeys(each.writes)) for each in self.graph.operations]

    @cached_property
    def during(self) -> list[int]:
        """Bytes per operation that come with a run beyond what is held: writes and workspace."""
        return [
            sum(self.size[s] for s in writes) + each.workspace_bytes
            for writes, each in zip(self.writes, self.graph.operations, strict=True)
        ]

    @cached_property
    def time(self) -> list[int]:
        """Time per operation, ns."""
        return [each.time_ns for each in self.graph.operations]

    @cached_property
    def outputs(self) -> tuple[int, ...]:
        """What comes, goes, and is there at the end of the forward: outputs first."""
        late = [s for s in self.graph.accumulated if s in self._made_forward]
        wanted = (*self.graph.outputs, *late, *self._updated_late)
        return tuple(dict.fromkeys(s for s in wanted if s not in self.staying))

    @cached_property
    def _made_forward(self) -> frozenset[int]:
        forwards = self.graph.operations[: self.graph.forwards]
        received = self._of(StorageKind.RECEIVED)
        return frozenset(s for each in forwards for s in each.writes) | frozenset(received)

    @cached_property
    def _updated_late(self) -> list[int]:
        """New buffers whose old values operations read that run for the first time later."""
        return [s for s in self.graph.updated if not self.updated_at_once(s)]

    def updated_at_once(self, storage: int) -> bool:
        """Whether a new buffer may be copied as soon as it is there (A4)."""
        targets = self.graph.storages[storage].targets
        old = {i for i, each in enumerate(self.graph.storages) if each.name in targets}
        maker = next(i for i, writes in enumerate(self.writes) if storage in writes)
        later = self.graph.operations[maker + 1 : self.graph.forwards]
        return not any(old.intersection(each.reads) for each in later)

    @cached_property
    def handed_back(self) -> tuple[int, ...]:
        """Gradients of inputs that come and go."""
        given = self.graph.input_gradients
        return tuple(dict.fromkeys(s for s in given if s not in self.staying))

    @cached_property
    def tangents(self) -> tuple[int, ...]:
        """Storages that come at the end of the forward."""
        return self._of(StorageKind.TANGENT)

    @cached_property
    def received(self) -> tuple[int, ...]:
        """Storages that come at the begin and go when they are freed."""
        return self._of(StorageKind.RECEIVED)

    def _of(self, kind: StorageKind) -> tuple[int, ...]:
        return tuple(i for i, each in enumerate(self.graph.storages) if each.kind is kind)

    @cached_property
    def unsaved(self) -> frozenset[int]:
        """Storages that do not count as saved (B5)."""
        return self.staying | set(self.graph.outputs) | set(self.received)

    @cached_property
    def constant(self) -> int:
        """Bytes that are there from the begin to the end: static ones and inputs."""
        inputs = (s.bytes for s in self.graph.storages if s.kind is StorageKind.INPUT)
        return sum(inputs) + self.graph.static_bytes

    @cached_property
    def least_peak(self) -> int:
        """Bytes that no order is below: an entry holds what it reads and makes at once (B2)."""
        return self.constant + max(
            self.comes(at) + sum(self.size[s] for s in set(self.needed(at)))
            for at in self.first_order()
        )

    def first_order(self) -> Order:
        """Every operation once, in the graph's order."""
        count, forwards = len(self.graph.operations), self.graph.forwards
        begin = (START,) if self.received else ()
        return (*begin, *range(forwards), END_F, *range(forwards, count))

    def made(self, at: int) -> tuple[int, ...]:
        """What an entry of an order makes: writes, tangents, received storages."""
        return self.writes[at] if at >= 0 else self.tangents if at == END_F else self.received

    def needed(self, at: int) -> tuple[int, ...]:
        """What an entry of an order reads: outputs at `END_F`."""
        return self.reads[at] if at >= 0 else self.outputs if at == END_F else ()

    def comes(self, at: int) -> int:
        """Bytes of an entry beyond what is held before it."""
        return self.during[at] if at >= 0 else sum(self.size[s] for s in self.made(at))
