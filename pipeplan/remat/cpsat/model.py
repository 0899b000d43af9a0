"""Whole-unit offloading as a CP-SAT model: (O11)-(O14) of docs/reference/remat-rules.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeplan.remat.offloading.compute_order import ComputeOrder, OffloadUnit
from pipeplan.remat.schedules.host_link import HostLink

if TYPE_CHECKING:
    from ortools.sat.python import cp_model

TICKS = 50_000
"""Steps into which the time of all computation is divided at most."""


@dataclass(frozen=True)
class UnitCopies:
    """A chosen unit: begins and length of its copies in ticks, and when it must be back.

    `first` and `last` are the first and last operation that it is away.
    """

    unit: OffloadUnit
    out: int
    back: int
    time: int
    due: int
    first: int
    last: int


class OffloadModel:
    """When operations and copies begin, and which units are away at which operation.

    Times are whole ticks, rounded down, so that every schedule has its image in the model: what is
    proven of the model holds for all of them.

    Attributes:
        grain: ns of a tick.
        begin: of each operation, and the end of the last one.
    """

    def __init__(
        self,
        cp: cp_model.CpModel,
        line: ComputeOrder,
        budget: int,
        channel: HostLink,
        most_ns: int,
    ) -> None:
        self.cp, self.line, self.budget, self.channel = cp, line, budget, channel
        self.grain = max(1, line.compute // TICKS)
        self.most = most_ns // self.grain
        self.time = [int(each) // self.grain for each in line.time]
        self.moved = {u.index: channel.time_ns(u.size) // self.grain for u in line.units}
        self.begin = [self._moment(f"begin {at}") for at in range(len(line.ops) + 1)]
        self.moves = {u.index: cp.new_bool_var(f"moves {u.index}") for u in line.units}
        self.out = {u.index: self._moment(f"out {u.index}") for u in line.units}
        self.back = {u.index: self._moment(f"back {u.index}") for u in line.units}
        self._left: dict[tuple[int, int], Any] = {}
        self._called: dict[tuple[int, int], Any] = {}

    def _moment(self, name: str) -> Any:
        return self.cp.new_int_var(0, self.most, name)

    def _end(self, at: int) -> Any:
        """When operation `at` ends; -1 is before the first."""
        return self.begin[at] + self.time[at] if at >= 0 else 0

    def left(self, unit: OffloadUnit, at: int) -> Any:
        """Whether the unit has left before operation `at` begins."""
        if at < unit.away:
            return 0
        return self._left[unit.index, at] if at < unit.due else self.moves[unit.index]

    def called(self, unit: OffloadUnit, at: int) -> Any:
        """Whether its way back has begun before operation `at` ends."""
        if at < unit.away:
            return 0
        return self._called[unit.index, at] if at < unit.due else self.moves[unit.index]

    def build(self, least_ns: int, chosen: frozenset[int]) -> None:
        """All constraints, the objective, and `chosen` as the units to try first."""
        for at in range(len(self.line.ops)):
            self.cp.add(self.begin[at + 1] >= self._end(at))
        copies: tuple[list[Any], list[Any]] = ([], [])
        for unit in self.line.units:
            self._states(unit)
            out, back = self._copies(unit)
            copies[0].append(out)
            copies[self.channel.duplex].append(back)
            self.cp.add_hint(self.moves[unit.index], unit.index in chosen)
        for way in copies:
            self.cp.add_no_overlap(way)
        for at, need in enumerate(self.line.need.tolist()):
            if need > self.budget:
                self._fits(at, need - self.budget)
                self._before(at)
                self._behind(at)
        self._around()
        # Rounded down by more than all sums that are rounded down in the model.
        rounding = len(self.time) + 2 * len(self.moved) + 1
        self.cp.add(self.begin[-1] >= max(0, least_ns // self.grain - rounding))
        self.cp.minimize(self.begin[-1])

    def _states(self, unit: OffloadUnit) -> None:
        """(O11) present, away, back again: each once, in this order."""
        moves = self.moves[unit.index]
        for at in range(unit.away, unit.due):
            left = self.cp.new_bool_var(f"left {unit.index} {at}")
            called = self.cp.new_bool_var(f"called {unit.index} {at}")
            self.cp.add_implication(called, left)
            self.cp.add_implication(left, moves)
            if at > unit.away:
                self.cp.add_implication(self._left[unit.index, at - 1], left)
                self.cp.add_implication(self._called[unit.index, at - 1], called)
            self._left[unit.index, at], self._called[unit.index, at] = left, called

    def _copies(self, unit: OffloadUnit) -> tuple[Any, Any]:
        """(O12) both copies of a unit, in ticks."""
        key, time = unit.index, self.moved[unit.index]
        moves, out, back = self.moves[key], self.out[key], self.back[key]
        self.cp.add(out >= self._end(unit.ready - 1))
        self.cp.add(back >= out + time).only_enforce_if(moves)
        self.cp.add(back >= self._end(unit.away - 1)).only_enforce_if(moves)
        self.cp.add(back + time <= self.begin[unit.due]).only_enforce_if(moves)
        for at in range(unit.away, unit.due):
            left, called = self._left[key, at], self._called[key, at]
            self.cp.add(out + time <= self.begin[at]).only_enforce_if(left)
            self.cp.add(back >= self._end(at)).only_enforce_if(called.negated(), moves)
        return (
            self.cp.new_optional_fixed_size_interval_var(out, time, moves, f"out {key}"),
            self.cp.new_optional_fixed_size_interval_var(back, time, moves, f"back {key}"),
        )

    def _fits(self, at: int, lacking: int) -> None:
        """(O13) whole units that are away make room, from the begin of `at` to its end."""
        units = [unit for unit in self.line.units if unit.away <= at < unit.due]
        at_begin = [u.size * (self.left(u, at) - self.called(u, at - 1)) for u in units]
        at_end = [u.size * (self.left(u, at + 1) - self.called(u, at)) for u in units]
        self.cp.add(sum(at_begin) >= lacking)
        self.cp.add(sum(at_end) >= lacking)

    def _before(self, at: int) -> None:
        """(O14) from any operation to the begin of `at`: all copies that must lie between."""
        for first in sorted({unit.ready for unit in self.line.units if unit.ready < at}):
            units = [u for u in self.line.units if u.ready >= first and u.away <= at]
            out = sum(self.moved[u.index] * self.left(u, at) for u in units)
            back = sum(self.moved[u.index] * self.moves[u.index] for u in units if u.due <= at)
            self._between(self.begin[at] - self._end(first - 1), out, back)

    def _behind(self, at: int) -> None:
        """(O14) from the end of `at` to any operation, likewise."""
        for last in sorted({unit.due for unit in self.line.units if unit.due > at}):
            units = [unit for unit in self.line.units if at < unit.due <= last]
            back = sum(
                self.moved[u.index] * (self.moves[u.index] - self.called(u, at)) for u in units
            )
            out = sum(self.moved[u.index] * self.moves[u.index] for u in units if u.ready > at)
            self._between(self.begin[last] - self._end(at), out, back)

    def _around(self) -> None:
        """(O14) from any operation to any later one: units that move and have their span there."""
        units = self.line.units
        for first in sorted({unit.ready for unit in units}):
            for last in sorted({unit.due for unit in units}):
                inside = [u for u in units if u.ready >= first and u.due <= last]
                if inside:
                    way = sum(self.moved[u.index] * self.moves[u.index] for u in inside)
                    self._between(self.begin[last] - self._end(first - 1), way, way)

    def _between(self, span: Any, out: Any, back: Any) -> None:
        if self.channel.duplex:
            self.cp.add(span >= out)
            self.cp.add(span >= back)
        else:
            self.cp.add(span >= out + back)

    def solution(self, value: Any) -> tuple[list[int], list[UnitCopies]]:
        """Ends of operations in ticks and the moves, where `value` gives a variable's value."""
        ends = [value(begin) + time for begin, time in zip(self.begin, self.time, strict=False)]
        found = []
        for unit in self.line.units:
            key = unit.index
            if not value(self.moves[key]):
                continue
            spots = range(unit.away, unit.due)
            away = [a for a in spots if value(self._left[key, a]) > value(self._called[key, a])]
            first, last = (away[0], away[-1]) if away else (unit.due, unit.away - 1)
            out, back, due = (
                value(v) for v in (self.out[key], self.back[key], self.begin[unit.due])
            )
            found.append(UnitCopies(unit, out, back, self.moved[key], due, first, last))
        return ends, found
