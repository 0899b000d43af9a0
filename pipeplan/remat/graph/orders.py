"""From an order of operations to a device program: what is held is what is used again.

Once the order is given in which operations run, and run again, the best moment to free a storage
is known: right behind its last reader before it is made anew, if it is at all. So the solvers of
this package decide orders and nothing else. Bytes are those of docs/reference/device-programs.md;
`Ledger` counts them for solvers, and the judge of programs says what a program does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from pipeplan.device_program import DeviceProgram, InstructionKind
from pipeplan.operator_graph import (
    ADDED,
    PERMANENT,
    OperatorGraph,
    Phase,
    StorageKind,
)

END_F = -1
"""In an order: the end of the forward."""

Order = tuple[int, ...]
"""Indices of operations as they run, with `END_F` once among them."""


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
        """Outputs that come and go."""
        return tuple(dict.fromkeys(s for s in self.graph.outputs if s not in self.staying))

    @cached_property
    def handed_back(self) -> tuple[int, ...]:
        """Gradients of inputs that come and go."""
        given = self.graph.input_gradients
        return tuple(dict.fromkeys(s for s in given if s not in self.staying))

    @cached_property
    def tangents(self) -> tuple[int, ...]:
        """Storages that come at the end of the forward."""
        kinds = enumerate(self.graph.storages)
        return tuple(i for i, each in kinds if each.kind is StorageKind.TANGENT)

    @cached_property
    def constant(self) -> int:
        """Bytes of the inputs, which stay from the begin to the end."""
        inputs = (s.bytes for s in self.graph.storages if s.kind is StorageKind.INPUT)
        return sum(inputs)

    def first_order(self) -> Order:
        """Every operation once, in the graph's order."""
        count, forwards = len(self.graph.operations), self.graph.forwards
        return (*range(forwards), END_F, *range(forwards, count))

    def made(self, at: int) -> tuple[int, ...]:
        """What an entry of an order makes: an operation's writes, tangents at `END_F`."""
        return self.tangents if at == END_F else self.writes[at]

    def needed(self, at: int) -> tuple[int, ...]:
        """What an entry of an order reads: outputs at `END_F`."""
        return self.outputs if at == END_F else self.reads[at]


@dataclass(frozen=True)
class Frees:
    """What goes behind each entry of an order.

    Attributes:
        read: of what the entry reads.
        made: of what it makes.
    """

    read: tuple[tuple[int, ...], ...]
    made: tuple[tuple[int, ...], ...]


def frees(ledger: Ledger, order: Order) -> Frees:
    """The earliest moments at which storages may go."""
    wanted = set(ledger.handed_back)
    read: list[tuple[int, ...]] = []
    made: list[tuple[int, ...]] = []
    for at in reversed(order):
        makes, needs = ledger.made(at), ledger.needed(at)
        made.append(tuple(s for s in makes if s not in wanted))
        wanted.difference_update(makes)
        read.append(tuple(s for s in needs if s not in wanted))
        wanted.update(needs)
    return Frees(tuple(reversed(read)), tuple(reversed(made)))


def bytes_during(ledger: Ledger, order: Order) -> list[int]:
    """Bytes during each entry of an order, inputs among them."""
    size, held, found = ledger.size, ledger.constant, []
    going = frees(ledger, order)
    for at, read, made in zip(order, going.read, going.made, strict=True):
        new = ledger.made(at)
        comes = sum(size[s] for s in new)
        found.append(held + (comes if at == END_F else ledger.during[at]))
        held += comes - sum(size[s] for s in read) - sum(size[s] for s in made)
    return found


def saved_bytes(ledger: Ledger, order: Order) -> int:
    """What is held at the end of the forward for the backward, without inputs and tangents."""
    size, held = ledger.size, 0
    going = frees(ledger, order)
    for at, read, made in zip(order, going.read, going.made, strict=True):
        gone = sum(size[s] for s in read)
        if at == END_F:
            return held - gone
        held += sum(size[s] for s in ledger.made(at)) - gone - sum(size[s] for s in made)
    raise ValueError("order: got no end of the forward, need END_F once")


def time_of(ledger: Ledger, order: Sequence[int]) -> int:
    """Time of all runs, ns."""
    return sum(ledger.time[at] for at in order if at != END_F)


def program(ledger: Ledger, order: Order) -> DeviceProgram:
    """The device program of an order: runs, frees, marks, and what is added or copied once."""
    return DeviceProgram.of(_instructions(ledger, order))


def _instructions(ledger: Ledger, order: Order) -> Iterator[tuple[InstructionKind, int]]:
    going, done = frees(ledger, order), set[int]()
    end = _end_of_inputs(ledger, order)
    for position, at in enumerate(order):
        if at == END_F:
            yield InstructionKind.END_F, 0
        else:
            yield InstructionKind.RUN, at
            yield from _added(ledger, at, done)
        for storage in (*going.read[position], *going.made[position]):
            yield InstructionKind.FREE, storage
        if position == end:
            yield InstructionKind.END_I, 0


def _added(ledger: Ledger, at: int, done: set[int]) -> Iterator[tuple[InstructionKind, int]]:
    """What becomes of new values at the first run of their operation."""
    for storage in ledger.writes[at]:
        kind = ledger.graph.storages[storage].kind
        if kind in ADDED and storage not in done:
            done.add(storage)
            adds = kind is StorageKind.WEIGHT_GRADIENT
            yield (InstructionKind.ACCUMULATE if adds else InstructionKind.UPDATE), storage


def _end_of_inputs(ledger: Ledger, order: Order) -> int:
    """Where the last entry runs that is no weight gradient, behind the end of the forward."""
    phases = [None if at == END_F else ledger.graph.operations[at].phase for at in order]
    return max(i for i, each in enumerate(phases) if each is not Phase.WEIGHT_GRADIENT)


def profile_peak(ledger: Ledger, order: Order) -> int:
    """The most bytes held during an order, inputs among them."""
    return max(bytes_during(ledger, order))


def starts(lengths: Sequence[int]) -> list[int]:
    """Where runs of these lengths begin when laid end to end."""
    return [0, *accumulate(lengths)][:-1]
