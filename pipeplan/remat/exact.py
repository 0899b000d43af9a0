"""The fastest whole-unit offloading, in any order of transfers, with a bound: CP-SAT on Problem 1.

(O11)-(O14) of docs/remat.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from pipeplan.remat.bounds import paper_bound, whole_bound
from pipeplan.remat.channel import Channel
from pipeplan.remat.exact_model import Model, Move
from pipeplan.remat.line import Line
from pipeplan.remat.nowait import Timed, complete, no_wait
from pipeplan.remat.schedule import Op, OpKind

LARGEST = 8000
"""Units times operations above which the model is not worth its building."""


@dataclass(frozen=True)
class Proof:
    """The best schedule found, and a time that none is below; None where there is no schedule."""

    found: Timed | None
    bound_ns: int


def exact(
    line: Line, budget: int, channel: Channel, seconds: float = 10.0, start: Timed | None = None
) -> Proof:
    """Search all offloadings of `line` for `seconds`, for what is faster than `start`.

    Args:
        line: the operations.
        budget: bytes of the device.
        channel: the way to the host; with one transfer at a time the optimum is among what is
            searched, else the bound holds and the schedule is one of many.
        seconds: wall-clock limit.
        start: a known schedule; without one that of all units is taken.
    """
    from ortools.sat.python import cp_model

    if line.least > budget:
        return Proof(None, line.compute)
    known = start or no_wait(line, [unit.index for unit in line.units], budget, channel)
    assert known is not None, "all units away is what the least budget is"
    bound = lower_bound(line, budget, channel)
    if known.makespan_ns <= bound or len(line.units) * len(line.ops) > LARGEST:
        return Proof(known, bound)
    model = Model(cp_model.CpModel(), line, budget, channel, known.makespan_ns)
    chosen = frozenset(op.index for op in known.schedule.ops if op.kind is OpKind.OFFLOAD)
    model.build(bound, chosen)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.linearization_level = 2
    status = solver.solve(model.cp)
    bound = max(bound, int(solver.best_objective_bound) * model.grain)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        issues = _issues(*model.solution(solver.value), channel.duplex)
        found = complete(line, issues, budget, channel)
        if found is not None and found.makespan_ns < known.makespan_ns:
            known = found
    return Proof(known, bound)


def lower_bound(line: Line, budget: int, channel: Channel) -> int:
    """The best bound known without search."""
    whole = None if channel.duplex else whole_bound(line, budget, channel)
    # The fluid bound is a float: a little less than it cannot be too much.
    return max(paper_bound(line, budget, channel), int((whole or 0) * (1 - 1e-9)))


@dataclass
class _Copy:
    """A copy of a solution, times in ticks; it is issued from `earliest` to before `latest`."""

    begin: int
    op: Op
    time: int
    due: int
    earliest: int
    latest: int

    @property
    def out(self) -> bool:
        return self.op.kind is OpKind.OFFLOAD


def _issues(ends: list[int], moves: list[Move], duplex: bool) -> dict[int, list[Op]]:
    """Copies in the order of their begins, each behind the operations that had ended by then.

    Operations that take no time do not tell by the clock what comes first; then an offload comes
    before the operation that finds its unit away.
    """
    copies: list[_Copy] = []
    for move in moves:
        unit = move.unit
        offload, prefetch = Op(OpKind.OFFLOAD, unit.index), Op(OpKind.PREFETCH, unit.index)
        copies.append(_Copy(move.out, offload, move.time, move.due, unit.ready, move.first))
        copies.append(_Copy(move.back, prefetch, move.time, move.due, move.last + 1, unit.due))
    copies.sort(key=lambda copy: (copy.begin, not copy.out, copy.latest))
    if not duplex:
        _offloads_first(ends, copies)
    issues: dict[int, list[Op]] = {}
    at = 0
    for copy in copies:
        at = max(at, copy.earliest)
        while at < min(copy.latest, len(ends)) and ends[at] <= copy.begin:
            at += 1
        issues.setdefault(at, []).append(copy.op)
    return issues


def _offloads_first(ends: list[int], copies: list[_Copy]) -> None:
    """Within what (O13) leaves open: an offload before a prefetch that can be as late as that."""
    moved = True
    while moved:
        moved = False
        for place, (back, out) in enumerate(pairwise(copies)):
            begun = ends[out.earliest - 1] if out.earliest else 0
            free = begun <= back.begin and out.begin + out.time <= back.due
            if out.out and not back.out and out.op.index != back.op.index and free:
                out.begin, back.begin = back.begin, back.begin + out.time
                copies[place : place + 2] = out, back
                moved = True
