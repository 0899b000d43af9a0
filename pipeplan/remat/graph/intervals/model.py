"""Which operations run again, and how long each storage is kept, as a CP-SAT model.

A storage has one retention interval per run of the operation that makes it: from behind the run to
behind the last reader that takes that copy. A cumulative constraint keeps the bytes of all
intervals and of what runs within the peak (Bartan et al., Moccasin, section 2.3); a linear one
keeps what crosses the end of the forward within the saved bytes, as (2.19) of X. Zhao's thesis
does. That a storage is made anew only when no older copy is held costs nothing: the older one
could have gone before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeplan.remat.graph.intervals.run_variables import OperationRun, RunVariables
from pipeplan.remat.graph.intervals.slots import Slots

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


@dataclass
class Copy:
    """A storage as one run leaves it.

    Attributes:
        run: what makes it.
        end: the slot behind its last reader.
        crosses: literals of which one true means that it is read behind the end of the forward.
    """

    run: OperationRun
    end: Any
    crosses: list[tuple[Any, ...]] = field(default_factory=list)


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
        self.runs = RunVariables(cp, slots)
        self.copies: dict[int, list[Copy]] = {}
        self.maker: dict[int, int] = {}
        self._crossing: dict[int, Any] = {}

    def build(self, known: int | None = None, least: int = 0) -> None:
        """All constraints and the objective.

        Args:
            known: further time that is known to do, ns; None where nothing is.
            least: further time that nothing is below, ns.
        """
        for at in self.slots.heads:
            for storage in self.ledger.made(at):
                self.maker.setdefault(storage, at)
                self.copies[storage] = [self._copy(storage, run) for run in self.runs.of[at]]
        self._reads()
        for storage in self.ledger.handed_back:
            self._hand_back(self.copies[storage])
        self._memory()
        self._saved()
        self._heads()
        self._objective(known, least)

    def _reads(self) -> None:
        for at in self.slots.heads:
            for run in self.runs.of[at]:
                for storage in self.ledger.needed(at):
                    self._read(run, storage)

    def _copy(self, storage: int, run: OperationRun) -> Copy:
        """A copy that lives until `end`."""
        earliest = run.slot if run.fixed else self.slots.again(run.at)[0]
        end = self.cp.new_int_var(earliest + 1, self.slots.horizon, f"end {storage}")
        if not run.fixed:
            self.cp.add(end >= run.slot + 1)
        return Copy(run, end)

    def _hand_back(self, copies: list[Copy]) -> None:
        """The latest copy stays to the end."""
        for index, copy in enumerate(copies):
            present = [] if copy.run.fixed else [copy.run.present]
            later = [each.run.present.negated() for each in copies[index + 1 : index + 2]]
            self.cp.add(copy.end == self.slots.horizon).only_enforce_if(*present, *later)

    def _read(self, reader: OperationRun, storage: int, given: tuple[Any, ...] = ()) -> None:
        """A reader takes the latest copy before it, which is kept to behind it.

        Where an older one is kept as well, it could go: nothing is lost. With literals `given` it
        reads where they are true.
        """
        copies = self.copies[storage]
        made = [
            self.runs.before(copy.run, reader.slot)
            if reader.fixed
            else self.runs.between(copy.run, reader)
            for copy in copies[1:]
        ]
        for index, copy in enumerate(copies):
            is_made = () if index == 0 else (made[index - 1],)
            later = (made[index],) if index < len(made) else ()
            if 0 in map(_number, is_made):
                continue
            when = (
                *given,
                *(() if reader.fixed else (reader.present,)),
                *is_made,
                *(each.negated() for each in later if _number(each) != 0),
            )
            self.cp.add(copy.end >= reader.slot + 1).only_enforce_if(*when)
            if self.runs.earliest(reader) > self.slots.end:
                copy.crosses.append(when)

    def _memory(self) -> None:
        """Bytes held and bytes of what runs, at every slot."""
        intervals, demands = [], []
        for at, runs in self.runs.of.items():
            for run in runs:
                intervals.append(self._interval(run.slot, 1, run.slot + 1, run.present))
                demands.append(self._comes(at))
        for storage, copies in self.copies.items():
            if self.units[storage]:
                for copy in copies:
                    begin = copy.run.slot + 1
                    length = self.cp.new_int_var(0, self.slots.horizon, "")
                    intervals.append(self._interval(begin, length, copy.end, copy.run.present))
                    demands.append(self.units[storage])
        for interval, demand in self._beside():
            intervals.append(interval)
            demands.append(demand)
        self.cp.add_cumulative(intervals, demands, self.cap)

    def _beside(self) -> Iterable[tuple[Any, int]]:
        """Further intervals and their units; a model with choices has some."""
        return ()

    def _beside_at(self, slot: int) -> tuple[int, Any]:
        """Of these the most units at a first run, and the units there as an expression."""
        return 0, 0

    def _beside_saved(self) -> Any:
        """Of these the units that are there at the end of the forward."""
        return 0

    def _comes(self, at: int) -> int:
        """Units of an entry beyond what is held."""
        return self.during[at] if at >= 0 else sum(self.units[s] for s in self.ledger.made(at))

    def _interval(self, begin: Any, length: Any, end: Any, present: Any) -> Any:
        if present is True:
            return self.cp.new_interval_var(begin, length, end, "")
        return self.cp.new_optional_interval_var(begin, length, end, present, "")

    def _saved(self) -> None:
        """What crosses the end of the forward (2.19)."""
        held = []
        for storage, copies in self.copies.items():
            early = [copy for copy in copies if self.runs.earliest(copy.run) < self.slots.end]
            if self.units[storage] and early:
                self._crossing[storage] = self._crosses(early, storage)
                if storage not in self.ledger.unsaved:
                    held.append(self.units[storage] * self._crossing[storage])
        if self.saved is not None:
            self.cp.add(sum(held) + self._beside_saved() <= self.saved)

    def _crosses(self, copies: list[Copy], storage: int) -> Any:
        """Whether a storage is there behind the end of the forward, and was before it."""
        end = self.slots.end
        crosses = self.cp.new_bool_var(f"{storage} crosses")
        for copy in copies:
            if copy.run.fixed:
                self.cp.add(copy.end <= end + 1).only_enforce_if(crosses.negated())
                for when in (
                    copy.crosses
                    if len(self.copies[storage]) == len(copies) == 1
                    or (self._earliest_again(storage) > end)
                    else ()
                ):
                    self.cp.add_bool_or(crosses, *(each.negated() for each in when))
                continue
            late, short = (self.cp.new_bool_var("") for _ in range(2))
            self.cp.add(copy.run.slot >= end + 1).only_enforce_if(late)
            self.cp.add(copy.end <= end + 1).only_enforce_if(short)
            self.cp.add_bool_or(crosses, late, short, copy.run.present.negated())
        return crosses

    def _earliest_again(self, storage: int) -> int:
        copies = self.copies[storage]
        return self.runs.earliest(copies[1].run) if len(copies) > 1 else self.slots.horizon

    def _heads(self) -> None:
        """Bytes at first runs, as linear constraints.

        They follow from the cumulative constraint. A storage is held at a first run where a later
        one reads it, unless it is made anew between both; a linear relaxation sees what must go.
        """
        readers: dict[int, list[int]] = {}
        for at in self.slots.heads:
            for storage in self.ledger.needed(at):
                readers.setdefault(storage, []).append(self.slots.first(at))
        for storage in self.ledger.handed_back:
            readers.setdefault(storage, []).append(self.slots.horizon)
        for at in self.slots.heads:
            here = self.slots.first(at)
            held = [
                (storage, min(slot for slot in slots if slot >= here))
                for storage, slots in readers.items()
                if self.copies[storage][0].run.slot < here <= slots[-1] and self.units[storage]
            ]
            most, beside = self._beside_at(here)
            if sum(self.units[s] for s, _ in held) + most + self._comes(at) > self.cap:
                self._head(here, held, self.cap - self._comes(at), beside)

    def _head(self, here: int, held: list[tuple[int, int]], room: int, beside: Any) -> None:
        terms = [beside]
        for storage, reader in held:
            away = 0
            if here == self.slots.end and reader > here:
                away = 1 - self._crossing[storage]
            elif reader > here:
                for run in self.runs.of[self.maker[storage]][1:]:
                    away += self.runs.before(run, reader) - self.runs.before(run, here)
            terms.append(self.units[storage] * (1 - away))
        self.cp.add(sum(terms) <= room)

    def _objective(self, known: int | None, least: int) -> None:
        further = self._slower() + sum(
            self.ledger.time[at] * run.present
            for at, runs in self.runs.of.items()
            for run in runs[1:]
        )
        if isinstance(further, int):
            return
        if known is not None:
            self.cp.add(further <= known)
        if least:
            self.cp.add(further >= least)
        self.cp.minimize(further)

    def _slower(self) -> Any:
        """Time of what was chosen beyond the fastest, in a model with choices."""
        return 0


def _number(literal: Any) -> int | None:
    """The value of what is no variable."""
    return literal if isinstance(literal, int) else None
