"""Variables of runs: which operations run again, when, and before what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeplan.remat.graph.intervals.slots import Slots
from pipeplan.remat.graph.ledger import Order

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


@dataclass(frozen=True)
class OperationRun:
    """One run of an operation, or the end of the forward.

    Attributes:
        at: the operation, or `END_F`.
        slot: a number, or the variable of a further run.
        present: whether it takes place; True, or a variable.
        number: 0 of the first run.
    """

    at: int
    slot: Any
    present: Any = True
    number: int = 0

    @property
    def fixed(self) -> bool:
        """Whether it is a first run."""
        return self.number == 0


class RunVariables:
    """Runs of all operations of a graph.

    Attributes:
        of: the runs of an operation, of `END_F` and of `START`; the first one first.
    """

    def __init__(self, cp: cp_model.CpModel, slots: Slots) -> None:
        self.cp, self.slots = cp, slots
        self.of: dict[int, list[OperationRun]] = {}
        self._before: dict[tuple[int, int, int], Any] = {}
        for at in slots.heads:
            self._add(at)

    def _add(self, at: int) -> None:
        cp, again = self.cp, self.slots.again(at) if at >= 0 else []
        found = [OperationRun(at, self.slots.first(at))]
        count = self.slots.runs[at] if again else 1
        for number in range(1, min(count, len(again) + 1)):
            domain = _domain(again[number - 1 :])
            run = OperationRun(
                at,
                cp.new_int_var_from_domain(domain, f"slot {at} {number}"),
                cp.new_bool_var(f"again {at} {number}"),
                number,
            )
            if number > 1:
                cp.add_implication(run.present, found[-1].present)
                cp.add(found[-1].slot < run.slot).only_enforce_if(run.present)
            found.append(run)
        self.of[at] = found

    def before(self, run: OperationRun, moment: int) -> Any:
        """Whether a further run takes place before a slot; one literal per pair."""
        again = self.slots.again(run.at)
        if again[0] > moment:
            return 0
        if again[-1] < moment:
            return run.present
        key = (run.at, run.number, moment)
        if key not in self._before:
            literal = self.cp.new_bool_var(f"{key[0]} {key[1]} before {moment}")
            self.cp.add_implication(literal, run.present)
            self.cp.add(run.slot <= moment - 1).only_enforce_if(literal)
            self.cp.add(run.slot >= moment + 1).only_enforce_if(literal.negated(), run.present)
            self._before[key] = literal
        return self._before[key]

    def between(self, run: OperationRun, reader: OperationRun) -> Any:
        """Whether a further run takes place before that of a reader, which may not take place."""
        again, last = self.slots.again(run.at), self.slots.again(reader.at)
        if again[0] > last[-1]:
            return 0
        literal = self.cp.new_bool_var("")
        self.cp.add_implication(literal, run.present)
        self.cp.add_implication(literal, reader.present)
        self.cp.add(run.slot + 1 <= reader.slot).only_enforce_if(literal)
        self.cp.add(run.slot >= reader.slot + 1).only_enforce_if(
            literal.negated(), run.present, reader.present
        )
        return literal

    def earliest(self, run: OperationRun) -> int:
        """The first slot of a run."""
        return int(run.slot) if run.fixed else self.slots.again(run.at)[0]

    def hint(self, order: Order) -> None:
        """Start the search from an order."""
        again = self.slots.reruns(order)
        for at, runs in self.of.items():
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
                for at, runs in self.of.items()
                for run in runs[1:]
                if value(run.present)
            ]
        )


def _domain(values: list[int]) -> Any:
    from ortools.sat.python import cp_model

    return cp_model.Domain.from_values(values)
