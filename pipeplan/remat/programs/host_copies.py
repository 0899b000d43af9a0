"""Which parameters, optimizer states and gradients the host has, and whether they are current.

The rules (A12)-(A16) of docs/reference/device-programs.md, of graphs that have updates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pipeplan.device_program import DeviceProgram, InstructionKind
from pipeplan.operator_graph import PERMANENT, Operation, OperatorGraph, Phase
from pipeplan.remat.schedules.device_state import UnitLocation


@dataclass(frozen=True)
class Placement:
    """Where parameters, optimizer states and waiting gradients are between two steps.

    Attributes:
        device: indices of storages whose value is on the device.
        host: indices of storages whose value the host has; those in both have a copy there.
    """

    device: frozenset[int]
    host: frozenset[int]

    @classmethod
    def without_host(cls, graph: OperatorGraph) -> Placement:
        """All that stays from one micro-batch to the next is on the device alone."""
        places = (i for i, each in enumerate(graph.storages) if each.kind in PERMANENT)
        return cls(frozenset(places), frozenset())


class CopiesOnHost:
    """The state of the host while a device runs a program.

    Attributes:
        states: what stays from one step to the next where there are updates, and the gradients
            that these read: they may be on device and host at once.
        begin: where states are at both ends of a step.
        buffers: those that the host has a place for, all the time.
        current: those whose value the host has.
        staying: those that are being copied to the host and stay on the device.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        begin: Placement | None = None,
        program: DeviceProgram | None = None,
    ) -> None:
        """At the begin of `program`, which says what is copied; None for both: nothing is."""
        self.begin = begin = begin or Placement.without_host(graph)
        self._operations = graph.operations
        updates = [each for each in graph.operations if each.phase is Phase.UPDATE]
        self.states = {storage for each in updates for storage in each.reads}
        self.current = set(begin.host)
        self.staying: set[int] = set()
        permanent = {i for i, each in enumerate(graph.storages) if each.kind in PERMANENT}
        self._permanent = permanent
        self._gradients = self.states - permanent
        self.states |= permanent if updates else set()
        self._waiting = self._gradients & (begin.device | begin.host)
        self._targets: dict[int, set[int]] = {each: set() for each in self._gradients}
        for each in updates:
            for storage in self._gradients.intersection(each.reads):
                self._targets[storage].update(each.writes)
        self._written: Counter[int] = Counter()
        instructions = program.instructions if program else ()
        copied = {each.index for each in instructions if each.kind is InstructionKind.COPY}
        self.buffers = begin.host | copied

    def refuse_begin(self) -> str | None:
        """Why a step cannot begin so."""
        for each in sorted(self.begin.device | self.begin.host):
            if each not in self._permanent | self._gradients:
                return f"(A16) storage {each} does not stay from one step to the next"
        lost = sorted(self._permanent - self.begin.device - self.begin.host)
        return (
            f"(A16) storage {lost[0]} is neither on the device nor on the host" if lost else None
        )

    def refuse_copy(self, storage: int, place: UnitLocation | None) -> str | None:
        """(A12)."""
        if storage not in self.states:
            return "(A12) it is no state of a step that updates"
        if place is not UnitLocation.DEVICE:
            return f"(A12) it is {place or 'not there'}"
        return None

    def refuse_free(self, storage: int, place: UnitLocation | None) -> str | None:
        """(A13), of a state."""
        if place not in (UnitLocation.DEVICE, UnitLocation.HOST):
            return f"(A13) it is {place or 'not there'}"
        if storage in self._gradients and storage not in self._waiting:
            return None
        if place is UnitLocation.HOST:
            return "(A13) the host has its only value"
        return None if storage in self.current else "(A13) the host has not its value"

    def refuse_run(self, operation: Operation) -> str | None:
        """(A15): what it reads is updated, what it makes has no other value."""
        if operation.phase is Phase.FORWARD:
            for each in sorted(self._waiting):
                late = self._targets[each].intersection(operation.reads)
                if late:
                    return f"(A15) reads storage {min(late)}, whose update has not run"
        again = sorted(self._waiting.intersection(operation.writes))
        return f"(A15) makes gradient {again[0]}, which no update has read" if again else None

    def refuse_update(
        self, index: int, places: Mapping[int, UnitLocation], on_host: bool
    ) -> str | None:
        """(A14), of operation `index`."""
        operation = self._operations[index] if index < len(self._operations) else None
        if operation is None or operation.phase is not Phase.UPDATE:
            return "(A14) the graph has no such update"
        need = UnitLocation.HOST if on_host else UnitLocation.DEVICE
        for each in operation.reads:
            if places.get(each) is not need:
                return f"(A14) storage {each} is {places.get(each, 'not there')}, need it {need}"
            if each in self._gradients and each not in self._waiting:
                return f"(A14) reads gradient {each} a second time"
        return None

    def ran(self, index: int, on_host: bool = False) -> None:
        """Behind operation `index`."""
        operation = self._operations[index]
        if operation.phase is not Phase.UPDATE:
            self.current.difference_update(self._gradients.intersection(operation.writes))
            self._waiting.update(self._gradients.intersection(operation.writes))
            return
        self._waiting.difference_update(operation.reads)
        self._written.update(operation.writes)
        if not on_host:
            self.current.difference_update(operation.writes)

    def copied(self, storage: int) -> None:
        """A copy of `storage` to the host has ended."""
        self.staying.discard(storage)
        self.current.add(storage)

    def given_up(self, storage: int) -> bool:
        """Whether the value of a storage that the device gives up remains on the host."""
        if storage in self.states and storage in self._permanent | self._waiting:
            return True
        self.current.discard(storage)
        return False

    def refuse_end(self, places: Mapping[int, UnitLocation]) -> str | None:
        """(A16): the end is the begin, every update has run once."""
        device = {
            each for each in self._staying_states() if places.get(each) is UnitLocation.DEVICE
        }
        host = self.current & self._staying_states()
        for name, now, first in (
            ("device", device, self.begin.device),
            ("host", host, self.begin.host),
        ):
            differs = sorted(now ^ first)
            if differs:
                return f"(A11) storage {differs[0]} is on the {name} at one end of the step alone"
        targets = {each for written in self._targets.values() for each in written}
        wrong = sorted(each for each in targets if self._written[each] != 1)
        return f"(A16) storage {wrong[0]} is not updated once" if wrong else None

    def _staying_states(self) -> set[int]:
        return self._permanent | self._waiting
