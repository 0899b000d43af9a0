"""Which way each part of a level runs, beside when it runs again: H-ILP in interval form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeplan.remat.graph.hierarchy.level import ClusterLevel, ClusterPart
from pipeplan.remat.graph.intervals.model import IntervalModel
from pipeplan.remat.graph.intervals.slots import Slots
from pipeplan.remat.graph.ledger import Order

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


@dataclass(frozen=True)
class WayChoice:
    """How one part runs.

    The phantom is that of its last forward before the backward: kept from the first forward, or
    from one that runs again. One that is kept while its forward runs again could have gone.

    Attributes:
        first: literal per way: kept from the first forward.
        again: literal per way: kept from a further one; none where there is none.
    """

    first: list[Any]
    again: list[Any]

    def by(self, way: int) -> list[Any]:
        """The literals of one way."""
        return [self.first[way], *self.again[way : way + 1]]


class WayModel(IntervalModel):
    """The interval model of a level's graph, with a choice per part.

    Attributes:
        choices: of each part.
    """

    def __init__(
        self,
        cp: cp_model.CpModel,
        level: ClusterLevel,
        slots: Slots,
        unit: int,
        caps: tuple[int, int | None],
    ) -> None:
        """The model within `caps`, peak and saved bytes, in units of `unit` bytes."""
        ledger, (peak, saved) = slots.ledger, caps
        units = [-(-each // unit) for each in ledger.size]
        during = [
            sum(units[s] for s in writes) + -(-each.workspace_bytes // unit)
            for writes, each in zip(ledger.writes, ledger.graph.operations, strict=True)
        ]
        limit = None if saved is None else saved // unit
        super().__init__(cp, slots, peak // unit, limit, units, during)
        self.level, self.unit = level, unit
        self.choices = [self._choice(index) for index in range(len(level.parts))]

    def _choice(self, index: int) -> WayChoice:
        part = self.level.parts[index]
        further = self.runs.of[index][1:]
        first = [self.cp.new_bool_var(f"first {index} {way}") for way in range(len(part.ways))]
        if not further:
            self.cp.add_exactly_one(first)
            return WayChoice(first, [])
        again = [self.cp.new_bool_var(f"again {index} {way}") for way in range(len(part.ways))]
        self.cp.add_exactly_one(*first, *again)
        late = self.runs.before(further[0], self._backward(index))
        self.cp.add(sum(again) == late)
        return WayChoice(first, again)

    def _backward(self, index: int) -> int:
        return self.slots.first(self.level.backward_of(index))

    def _reads(self) -> None:
        """Also what backwards read in some ways alone (3.14)."""
        super()._reads()
        for at, values in self.level.maybe.items():
            choice = self.choices[self.level.backward_of(at)]
            for storage, ways in values.items():
                for literal in (each for way in ways for each in choice.by(way)):
                    self._read(self.runs.of[at][0], storage, (literal,))

    def _units(self, size: int) -> int:
        return -(-size // self.unit)

    def _beside(self) -> Iterable[tuple[Any, int]]:
        for index, (part, choice) in enumerate(zip(self.level.parts, self.choices, strict=True)):
            yield from self._phantoms(index, part, choice)
            for at, literals, more in self._more(index, part, choice):
                yield from self._fixed(at, literals, more)
            for run in self.runs.of[index][1:]:
                for literal, way in zip(choice.again, part.ways, strict=True):
                    more = self._units(way.forward_peak - part.forward_peak)
                    if more:
                        yield self._interval(run.slot, 1, run.slot + 1, literal), more

    def _phantoms(
        self, index: int, part: ClusterPart, choice: WayChoice
    ) -> Iterator[tuple[Any, int]]:
        """What a way saves, from its forward to its backward."""
        end = self._backward(index)
        for way, first in zip(part.ways, choice.first, strict=True):
            size = self._units(way.saved)
            begin = self.slots.first(index) + 1
            if size and begin < end:
                yield self._interval(begin, end - begin, end, first), size
        for way, again in zip(part.ways, choice.again, strict=False):
            size = self._units(way.saved)
            if size:
                begin = self.runs.of[index][1].slot + 1
                length = self.cp.new_int_var(0, self.slots.horizon, "")
                yield self._interval(begin, length, end, again), size

    def _more(
        self, index: int, part: ClusterPart, choice: WayChoice
    ) -> Iterator[tuple[int, list[Any], int]]:
        """Slot, literals and units of ways that take more than the least while they run."""
        for number, way in enumerate(part.ways):
            forward = self._units(way.forward_peak - part.forward_peak)
            backward = self._units(way.backward_peak - part.backward_peak)
            if forward:
                yield self.slots.first(index), [choice.first[number]], forward
            if backward:
                yield self._backward(index), choice.by(number), backward

    def _fixed(self, slot: int, literals: Sequence[Any], units: int) -> Iterator[tuple[Any, int]]:
        for literal in literals:
            yield self._interval(slot, 1, slot + 1, literal), units

    def _beside_at(self, slot: int) -> tuple[int, Any]:
        most, terms = 0, []
        for index, (part, choice) in enumerate(zip(self.level.parts, self.choices, strict=True)):
            if self.slots.first(index) < slot < self._backward(index):
                sizes = [self._units(way.saved) for way in part.ways]
                most += max(sizes)
                terms += [size * each for size, each in zip(sizes, choice.first, strict=True)]
            mine = [
                (units, literals)
                for at, literals, units in self._more(index, part, choice)
                if at == slot
            ]
            most += max((units for units, _ in mine), default=0)
            terms += [units * each for units, literals in mine for each in literals]
        return most, sum(terms)

    def _beside_saved(self) -> Any:
        return sum(
            self._units(way.saved) * each
            for part, choice in zip(self.level.parts, self.choices, strict=True)
            for way, each in zip(part.ways, choice.first, strict=True)
        )

    def _slower(self) -> Any:
        return sum(
            (way.backward_ns - part.ways[0].backward_ns) * each
            for part, choice in zip(self.level.parts, self.choices, strict=True)
            for number, way in enumerate(part.ways)
            for each in choice.by(number)
        )

    def chosen(self, value: Any) -> tuple[int, ...]:
        """The way of each part in a solution; `value` gives a literal's value."""
        return tuple(
            next(
                way
                for way in range(len(choice.first))
                if any(value(each) for each in choice.by(way))
            )
            for choice in self.choices
        )

    def hint_ways(self, ways: Sequence[int], runs: Order) -> None:
        """Start the search from the ways of a plan whose parts ran in this order."""
        for index, (choice, chosen) in enumerate(zip(self.choices, ways, strict=True)):
            early = runs[: runs.index(self.level.backward_of(index))]
            late = bool(choice.again) and early.count(index) > 1
            for way, literal in enumerate(choice.first):
                self.cp.add_hint(literal, way == chosen and not late)
            for way, literal in enumerate(choice.again):
                self.cp.add_hint(literal, way == chosen and late)
