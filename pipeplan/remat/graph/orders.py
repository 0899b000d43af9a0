"""From an order of operations to a device program: what is held is what is used again.

Once the order is given in which operations run, and run again, the best moment to free a storage
is known: right behind its last reader before it is made anew, if it is at all. So the solvers of
this package decide orders and nothing else. Bytes are those of docs/reference/device-programs.md;
`Ledger` counts them for solvers, and the judge of programs says what a program does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from pipeplan.device_program import DeviceProgram, InstructionKind
from pipeplan.operator_graph import PERMANENT, OperatorGraph, Phase, StorageKind

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
    """Bytes during each entry of an order, static ones and inputs among them (B1)-(B4)."""
    size, held, found = ledger.size, ledger.constant, []
    going = frees(ledger, order)
    for at, read, made in zip(order, going.read, going.made, strict=True):
        found.append(held + ledger.comes(at))
        held += sum(size[s] for s in ledger.made(at))
        held -= sum(size[s] for s in read) + sum(size[s] for s in made)
    return found


def peak_bytes(ledger: Ledger, order: Order) -> int:
    """The most bytes during an order."""
    return max(bytes_during(ledger, order))


def saved_bytes(ledger: Ledger, order: Order) -> int:
    """What is held at the end of the forward, without static bytes, inputs and outputs (B5)."""
    held = set[int]()
    going = frees(ledger, order)
    for at, read, made in zip(order, going.read, going.made, strict=True):
        if at == END_F:
            break
        held.update(ledger.made(at))
        held.difference_update(read, made)
    return sum(ledger.size[s] for s in held - ledger.unsaved)


def time_of(ledger: Ledger, order: Iterable[int]) -> int:
    """Time of all runs, ns."""
    return sum(ledger.time[at] for at in order if at >= 0)


def further(ledger: Ledger, order: Order) -> int:
    """Time of an order beyond that of every operation once, ns."""
    return time_of(ledger, order) - sum(ledger.time)


def fits(ledger: Ledger, order: Order, peak: int, saved: int | None = None) -> bool:
    """Whether an order keeps budgets in bytes."""
    within = saved is None or saved_bytes(ledger, order) <= saved
    return within and peak_bytes(ledger, order) <= peak


def tidy(ledger: Ledger, order: Order) -> Order:
    """An order without further runs of which nothing is used."""
    while True:
        seen: set[int] = set()
        made = frees(ledger, order).made
        left = []
        for position, at in enumerate(order):
            useless = at in seen and len(made[position]) == len(ledger.made(at))
            if not useless:
                left.append(at)
            seen.add(at)
        if len(left) == len(order):
            return order
        order = tuple(left)


def program(ledger: Ledger, order: Order) -> DeviceProgram:
    """The device program of an order: runs, frees, marks, and what is added or copied once."""
    return DeviceProgram.of(_instructions(ledger, order))


def _instructions(ledger: Ledger, order: Order) -> Iterator[tuple[InstructionKind, int]]:
    going, added = frees(ledger, order), _Added(ledger)
    end = _end_of_inputs(ledger, order)
    for position, at in enumerate(order):
        if at == END_F:
            yield from added.before_end()
            yield InstructionKind.END_F, 0
            yield from added.behind_end()
        elif at >= 0:
            yield InstructionKind.RUN, at
            yield from added.run(at)
        if position == end:
            yield InstructionKind.END_I, 0
        for storage in (*going.read[position], *going.made[position]):
            yield InstructionKind.FREE, storage


class _Added:
    """What is added to gradients, behind the end of the forward, and copied into buffers."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.left = {*ledger.graph.accumulated, *ledger.graph.updated}
        self.behind = False

    def run(self, at: int) -> Iterator[tuple[InstructionKind, int]]:
        """At the first run of an operation."""
        for storage in self.ledger.writes[at]:
            if storage not in self.left:
                continue
            new = self.ledger.graph.storages[storage].kind is StorageKind.NEW_BUFFER
            if new and self.ledger.updated_at_once(storage):
                yield from self._add(InstructionKind.UPDATE, storage)
            elif not new and self.behind:
                yield from self._add(InstructionKind.ACCUMULATE, storage)

    def before_end(self) -> Iterator[tuple[InstructionKind, int]]:
        for storage in self.ledger.graph.updated:
            if storage in self.left:
                yield from self._add(InstructionKind.UPDATE, storage)

    def behind_end(self) -> Iterator[tuple[InstructionKind, int]]:
        self.behind = True
        for storage in (*self.ledger.outputs, *self.ledger.tangents):
            if storage in self.left:
                yield from self._add(InstructionKind.ACCUMULATE, storage)

    def _add(self, kind: InstructionKind, storage: int) -> Iterator[tuple[InstructionKind, int]]:
        self.left.discard(storage)
        yield kind, storage


def _end_of_inputs(ledger: Ledger, order: Order) -> int:
    """Where the last entry runs that is no weight gradient or makes an input's gradient."""
    operations, back = ledger.graph.operations, set(ledger.handed_back)
    return max(
        position
        for position, at in enumerate(order)
        if at < 0
        or operations[at].phase is not Phase.WEIGHT_GRADIENT
        or back.intersection(ledger.writes[at])
    )
