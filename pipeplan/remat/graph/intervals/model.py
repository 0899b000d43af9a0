"""Which operations run again, and how long each storage is kept, as a CP-SAT model.

A storage has one retention interval per run of the operation that makes it: from behind the run to
behind the last reader that takes that copy. A cumulative constraint keeps the bytes of all
intervals and of what runs within the peak (Bartan et al., Moccasin, section 2.3); a linear one
keeps what crosses the end of the forward within the saved bytes, as (2.19) of X. Zhao's thesis
does. That a storage is made anew only when no older copy is held costs nothing: the older one
could have gone before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeplan.remat.graph.intervals.slots import Slots
from pipeplan.remat.graph.orders import END_F, Order

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


@dataclass(frozen=True)
class Run:
    """One run of an operation, or the end of the forward.

    Attributes:
        at: the operation, or `END_F`.
        slot: a number, or the variable of a further run.
        present: whether it takes place; True, or a variable.
    """

    at: int
    slot: Any
    present: Any = True

    @property
    def fixed(self) -> bool:
        """Whether it is a first run."""
        return self.present is True


@dataclass
class Copy:
    """A storage as one run leaves it.

    Attributes:
        run: what makes it.
        end: the slot behind its last reader.
    """

    run: Run
    end: Any
    readers: list[tuple[Run, Any]] = field(default_factory=list)


class IntervalModel:
    """The model of one graph within one pair of budgets.

    Attributes:
        cp: variables and constraints.
        slots: where operations may run.
        cap: units of memory that come and go.
        saved: units that may cross the end of the forward, or None.
        units: of each storage, rounded up.
        during: of each operation while it runs, rounded up.
    """

    def __init__(
        self,
        cp: cp_model.CpModel,
        slots: Slots,
        cap: int,
        saved: int | None,
        units: list[int],
        during: list[int],
    ) -> None:
        self.cp, self.slots, self.ledger = cp, slots, slots.ledger
        self.cap, self.saved, self.units, self.during = cap, saved, units, during
        self.runs: dict[int, list[Run]] = {}
        self.copies: dict[int, list[Copy]] = {}
        self.crossing: dict[tuple[int, int], Any] = {}

    def build(self, known: int | None = None, least: int = 0) -> None:
        """All constraints and the objective.

        Args:
            known: further time that is known to do, ns; None where nothing is.
            least: further time that nothing is below, ns.
        """
        for at in self.slots.heads:
            self._runs(at)
        for at in self.slots.heads:
            for storage in self.ledger.made(at):
                self.copies[storage] = [self._copy(storage, run) for run in self.runs[at]]
        for at in self.slots.heads:
            for run in self.runs[at]:
                for storage in self.ledger.needed(at):
                    self._reads(run, storage)
        for storage in self.ledger.handed_back:
            self.cp.add(self.copies[storage][-1].end == self.slots.horizon)
        self._memory()
        self._saved()
        self._heads()
        self._objective(known, least)

    def _runs(self, at: int) -> None:
        cp, again = self.cp, self.slots.again(at) if at != END_F else []
        found = [Run(at, self.slots.first(at))]
        count = 1 if at == END_F or not again else self.slots.runs[at]
        for number in range(1, count):
            domain = _domain(again[number - 1 :])
            run = Run(
                at,
                cp.new_int_var_from_domain(domain, f"slot {at} {number}"),
                cp.new_bool_var(f"again {at} {number}"),
            )
            if number > 1:
                cp.add_implication(run.present, found[-1].present)
                cp.add(found[-1].slot < run.slot)
            found.append(run)
        self.runs[at] = found

    def _copy(self, storage: int, run: Run) -> Copy:
        """A copy that lives until `end`."""
        earliest = run.slot if run.fixed else self.slots.again(run.at)[0]
        end = self.cp.new_int_var(earliest + 1, self.slots.horizon, f"end {storage}")
        if not run.fixed:
            self.cp.add(end >= run.slot + 1)
        return Copy(run, end)

    def _reads(self, reader: Run, storage: int) -> None:
        """A reader takes one copy, made before it and kept to behind it."""
        taken: list[Any] = []
        if reader.fixed and len(self.copies[storage]) == 1:
            self._take(reader, self.copies[storage][0], True)
            return
        for index, copy in enumerate(self.copies[storage]):
            if self._may_take(reader, copy):
                taken.append(self.cp.new_bool_var(f"{reader.at} takes {storage} {index}"))
                self._take(reader, copy, taken[-1])
        if reader.fixed:
            self.cp.add_exactly_one(taken)
        else:
            self.cp.add(sum(taken) == reader.present)

    def _may_take(self, reader: Run, copy: Copy) -> bool:
        """Whether the copy can be there at all."""
        latest = reader.slot if reader.fixed else self.slots.again(reader.at)[-1]
        earliest = copy.run.slot if copy.run.fixed else self.slots.again(copy.run.at)[0]
        return bool(earliest < latest)

    def _take(self, reader: Run, copy: Copy, use: Any) -> None:
        copy.readers.append((reader, use))
        if use is True:
            self.cp.add(copy.end >= reader.slot + 1)
            return
        self.cp.add(copy.end >= reader.slot + 1).only_enforce_if(use)
        if not copy.run.fixed:
            self.cp.add_implication(use, copy.run.present)
            self.cp.add(copy.run.slot + 1 <= reader.slot).only_enforce_if(use)

    def _memory(self) -> None:
        """Bytes held and bytes of what runs, at every slot."""
        intervals, demands = [], []
        for at, runs in self.runs.items():
            comes = sum(self.units[s] for s in self.ledger.tangents)
            demand = comes if at == END_F else self.during[at]
            for run in runs:
                intervals.append(self._interval(run.slot, 1, run.slot + 1, run.present))
                demands.append(demand)
        for storage, copies in self.copies.items():
            if self.units[storage]:
                for copy in copies:
                    begin = copy.run.slot + 1
                    length = self.cp.new_int_var(0, self.slots.horizon, "")
                    intervals.append(self._interval(begin, length, copy.end, copy.run.present))
                    demands.append(self.units[storage])
        self.cp.add_cumulative(intervals, demands, self.cap)

    def _interval(self, begin: Any, length: Any, end: Any, present: Any) -> Any:
        if present is True:
            return self.cp.new_interval_var(begin, length, end, "")
        return self.cp.new_optional_interval_var(begin, length, end, present, "")

    def _saved(self) -> None:
        """What crosses the end of the forward."""
        for storage, copies in self.copies.items():
            for index, copy in enumerate(copies):
                if self.units[storage] and self._before_end(copy.run):
                    self.crossing[storage, index] = self._crosses(copy, f"{storage} {index}")
        if self.saved is not None:
            held = [self.units[each] * var for (each, _), var in self.crossing.items()]
            self.cp.add(sum(held) <= self.saved)

    def _before_end(self, run: Run) -> bool:
        earliest = run.slot if run.fixed else self.slots.again(run.at)[0]
        return bool(earliest < self.slots.end)

    def _crosses(self, copy: Copy, name: str) -> Any:
        """Whether a copy is there behind the end of the forward, and was before it."""
        end = self.slots.end
        crosses = self.cp.new_bool_var(f"crosses {name}")
        if copy.run.fixed:
            self.cp.add(copy.end <= end + 1).only_enforce_if(crosses.negated())
            for reader, use in copy.readers:
                earliest = reader.slot if reader.fixed else self.slots.again(reader.at)[0]
                if earliest > end and use is not True:
                    self.cp.add_implication(use, crosses)
                elif earliest > end:
                    self.cp.add(crosses == 1)
            return crosses
        late, short = (self.cp.new_bool_var(f"{what} {name}") for what in ("late", "short"))
        self.cp.add(copy.run.slot >= end + 1).only_enforce_if(late)
        self.cp.add(copy.end <= end + 1).only_enforce_if(short)
        self.cp.add_bool_or(crosses, late, short, copy.run.present.negated())
        return crosses

    def _heads(self) -> None:
        """Bytes at first runs from the end of the forward on, as linear constraints.

        They follow from `_memory`, for what the first runs' copies hold; a linear relaxation sees
        in them what has to go.
        """
        firsts = [at for at in self.slots.heads if self.slots.first(at) >= self.slots.end]
        for at in firsts:
            here, terms, sure = self.slots.first(at), [], 0
            for storage, copies in self.copies.items():
                made = copies[0].run.slot
                uses = [
                    (reader.slot, use)
                    for reader, use in copies[0].readers
                    if reader.fixed and reader.slot >= here
                ]
                if made >= here or not uses:
                    continue
                slot, use = min(uses, key=lambda each: each[0])
                if at == END_F and slot != here:
                    terms.append(self.units[storage] * self.crossing[storage, 0])
                elif use is True or slot == here:
                    sure += self.units[storage]
                else:
                    terms.append(self.units[storage] * use)
            comes = sum(self.units[s] for s in self.ledger.tangents)
            sure += comes if at == END_F else self.during[at]
            if terms:
                self.cp.add(sum(terms) <= self.cap - sure)

    def _objective(self, known: int | None, least: int) -> None:
        terms = [
            self.ledger.time[at] * run.present
            for at, runs in self.runs.items()
            for run in runs[1:]
        ]
        further = sum(terms)
        if terms:
            if known is not None:
                self.cp.add(further <= known)
            if least:
                self.cp.add(further >= least)
            self.cp.minimize(further)

    def hint(self, order: Order) -> None:
        """Start the search from an order."""
        again: Mapping[int, list[int]] = self.slots.reruns(order)
        for at, runs in self.runs.items():
            known = again.get(at, [])
            for index, run in enumerate(runs[1:]):
                there = index < len(known)
                self.cp.add_hint(run.present, there)
                if there:
                    self.cp.add_hint(run.slot, known[index])

    def order(self, value: Any) -> Order:
        """The order of a solution; `value` gives a variable's value."""
        return self.slots.order(
            [
                (value(run.slot), at)
                for at, runs in self.runs.items()
                for run in runs[1:]
                if value(run.present)
            ]
        )


def _domain(values: list[int]) -> Any:
    from ortools.sat.python import cp_model

    return cp_model.Domain.from_values(values)
