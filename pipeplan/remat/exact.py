"""The fastest whole-unit offloading, in any order of transfers, with a bound: CP-SAT on Problem 1.

(O11) of docs/remat.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeplan.remat.channel import Channel
from pipeplan.remat.line import Line, Unit
from pipeplan.remat.nowait import Timed, complete
from pipeplan.remat.schedule import Op, OpKind
from pipeplan.units import ceil_div

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


@dataclass(frozen=True)
class Proof:
    """The best schedule found, and a time that none is below; None where there is no schedule."""

    found: Timed | None
    bound_ns: int


def exact(
    line: Line,
    budget: int,
    channel: Channel,
    seconds: float = 10.0,
    hint: frozenset[int] = frozenset(),
) -> Proof:
    """Search all offloadings of `line` for `seconds`, starting near the units of `hint`."""
    from ortools.sat.python import cp_model

    if line.least > budget:
        return Proof(None, line.compute)
    model = _Model(cp_model.CpModel(), line, budget, channel)
    model.build(hint)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    status = solver.solve(model.cp)
    bound = max(line.compute, model.bound(int(solver.best_objective_bound)))
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Proof(None, bound)
    return Proof(complete(line, model.issues(solver), budget, channel), bound)


class _Model:
    """Starts of operations and transfers; memory as a cumulative resource.

    A cumulative resource does not see operations that take no time: where there are some, each
    takes one tick, and a ns is more ticks than there are of them.
    """

    def __init__(self, cp: cp_model.CpModel, line: Line, budget: int, channel: Channel) -> None:
        self.cp, self.line, self.budget, self.channel = cp, line, budget, channel
        instant = [not time and op.computes for op, time in zip(line.ops, line.time, strict=True)]
        self.instants = sum(instant)
        self.grain = self.instants + 1
        self.time = [int(t) * self.grain + i for t, i in zip(line.time, instant, strict=True)]
        self.horizon = sum(self.time) + 2 * sum(self._moved(unit) for unit in line.units)
        self.start = [self._time(f"start {at}") for at in range(len(line.ops) + 1)]
        self.moves: dict[Unit, Any] = {}
        self.out: dict[Unit, Any] = {}
        self.back: dict[Unit, Any] = {}

    def _time(self, name: str) -> Any:
        return self.cp.new_int_var(0, self.horizon, name)

    def _moved(self, unit: Unit) -> int:
        return self.channel.time_ns(unit.size) * self.grain

    def bound(self, ticks: int) -> int:
        """Time in ns that `ticks` prove."""
        return ceil_div(max(0, ticks - self.instants), self.grain)

    def _end(self, at: int) -> Any:
        """When operation `at` ends; -1 is before the first."""
        return self.start[at] + self.time[at] if at >= 0 else 0

    def build(self, hint: frozenset[int]) -> None:
        """All constraints and the objective."""
        for at in range(len(self.line.ops)):
            self.cp.add(self.start[at + 1] >= self._end(at))
        ways: tuple[list[Any], list[Any]] = ([], [])
        spans, demands = self._operations()
        for unit in self.line.units:
            out, back = self._transfers(unit)
            ways[0].append(out)
            ways[self.channel.duplex].append(back)
            spans += self._present(unit)
            demands += [unit.size, unit.size]
            self.cp.add_hint(self.moves[unit], unit.index in hint)
        for way in ways:
            self.cp.add_no_overlap(way)
        self.cp.add_cumulative(spans, demands, self.budget)
        self.cp.minimize(self.start[-1])

    def _operations(self) -> tuple[list[Any], list[int]]:
        """Memory of operations and of the gaps between them, without what could be away."""
        spans, demands = [], []
        for at, need in enumerate(self.line.need.tolist()):
            span = self.cp.new_fixed_size_interval_var(self.start[at], self.time[at], f"op {at}")
            spans.append(span)
            demands.append(need - int(self.line.leavable[at]))
            size = self._time(f"gap {at}")
            spans.append(
                self.cp.new_interval_var(self._end(at), size, self.start[at + 1], f"gap {at}")
            )
            could = sum(unit.size for unit in self.line.units if unit.away <= at + 1 <= unit.due)
            demands.append(int(self.line.held[at]) - could)
        return spans, demands

    def _transfers(self, unit: Unit) -> tuple[Any, Any]:
        time, name = self._moved(unit), str(unit.index)
        moves = self.moves[unit] = self.cp.new_bool_var(f"moves {name}")
        self.out[unit], self.back[unit] = self._time(f"out {name}"), self._time(f"back {name}")
        out = self.cp.new_optional_fixed_size_interval_var(self.out[unit], time, moves, "out")
        back = self.cp.new_optional_fixed_size_interval_var(self.back[unit], time, moves, "back")
        self.cp.add(self.out[unit] >= self._end(unit.ready - 1))
        self.cp.add(self.back[unit] >= self.out[unit] + time).only_enforce_if(moves)
        self.cp.add(self.back[unit] >= self._end(unit.away - 1)).only_enforce_if(moves)
        self.cp.add(self.back[unit] + time <= self.start[unit.due]).only_enforce_if(moves)
        return out, back

    def _present(self, unit: Unit) -> list[Any]:
        """When the unit, no longer in use, is still on the device, and when it is there again."""
        moves, due = self.moves[unit], self.start[unit.due]
        left, back = self._time("left"), self._time("again")
        sizes = self._time("first"), self._time("second")
        self.cp.add(left >= self.out[unit] + self._moved(unit)).only_enforce_if(moves)
        self.cp.add(left >= due).only_enforce_if(moves.negated())
        self.cp.add(back <= self.back[unit]).only_enforce_if(moves)
        return [
            self.cp.new_interval_var(self._end(unit.away - 1), sizes[0], left, "before"),
            self.cp.new_interval_var(back, sizes[1], due, "after"),
        ]

    def issues(self, solver: cp_model.CpSolver) -> dict[int, list[Op]]:
        """The transfers in the order of their begins, each behind what had ended by then."""
        found: list[tuple[int, int, Op]] = []
        for unit, moves in self.moves.items():
            if solver.boolean_value(moves):
                found.append((solver.value(self.out[unit]), 0, Op(OpKind.OFFLOAD, unit.index)))
                found.append((solver.value(self.back[unit]), 1, Op(OpKind.PREFETCH, unit.index)))
        ends = [solver.value(self.start[at]) + t for at, t in enumerate(self.time)]
        issues: dict[int, list[Op]] = {}
        at = 0
        for start, _, op in sorted(found):
            unit = next(u for u in self.line.units if u.index == op.index)
            at = max(at, unit.ready if op.kind is OpKind.OFFLOAD else unit.away)
            while at < len(ends) and ends[at] <= start:
                at += 1
            issues.setdefault(at, []).append(op)
        return issues
