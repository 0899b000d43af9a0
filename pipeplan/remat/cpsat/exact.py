"""The fastest whole-unit offloading, in any order of transfers, with a bound: CP-SAT on Problem 1.

(O11)-(O14) of docs/reference/remat-rules.md; the model is ours.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pipeplan.remat.bounds import paper_bound, whole_bound
from pipeplan.remat.cpsat.model import OffloadModel, UnitCopies
from pipeplan.remat.offloading.compute_order import ComputeOrder
from pipeplan.remat.offloading.no_wait import NoWaitSchedule, no_wait, with_transfers
from pipeplan.remat.schedules.host_link import HostLink
from pipeplan.remat.schedules.schedule import DeviceOp, DeviceOpKind

LARGEST = 8000
"""Units times operations above which the model is not worth its building."""
_SLICE = 0.2
"""Of the time, what one question may take at most."""
_LEAST_SHARE = 1 / 16
"""Of the gap, where the search by questions ends: nearer to the bound answers tell little."""


@dataclass(frozen=True)
class Proof:
    """The best schedule found, and a time that none is below; None where there is no schedule."""

    found: NoWaitSchedule | None
    bound_ns: int


def exact_offload(
    line: ComputeOrder,
    budget: int,
    channel: HostLink,
    seconds: float = 10.0,
    start: NoWaitSchedule | None = None,
    goals: Sequence[int] = (),
) -> Proof:
    """Search all offloadings of `line` for `seconds`, for what is faster than `start`.

    Args:
        line: the operations.
        budget: bytes of the device.
        channel: the way to the host; with one transfer at a time the optimum is among what is
            searched, else the bound holds and the schedule is one of many.
        seconds: wall-clock limit.
        start: a known schedule; without one that of all units is taken.
        goals: times in ns of which to know first whether any schedule keeps them.
    """
    if line.least > budget:
        return Proof(None, line.compute)
    known = start or no_wait(line, [unit.index for unit in line.units], budget, channel)
    assert known is not None, "all units away is what the least budget is"
    bound = best_known_bound(line, budget, channel)
    if known.makespan_ns <= bound or len(line.units) * len(line.ops) > LARGEST:
        return Proof(known, bound)
    search = _ExactSearch(line, budget, channel, known, bound)
    end, share = time.monotonic() + seconds, 0.5
    for goal in sorted(goals):
        if search.bound < goal < search.known.makespan_ns and not search.closed:
            search.within(goal, seconds * _SLICE)
    while share > _LEAST_SHARE and not search.closed and time.monotonic() < end:
        most = search.bound + int(share * (search.known.makespan_ns - search.bound))
        answered = search.within(most, min(seconds * _SLICE, end - time.monotonic()))
        share = 0.5 if answered else share / 2
    if not search.closed and time.monotonic() < end:
        search.within(search.known.makespan_ns, end - time.monotonic())
    return Proof(search.known, search.bound)


@dataclass
class _ExactSearch:
    """The best schedule known and a time that none is below, while questions narrow them.

    Whether there is a schedule within a time, anywhere between both, is answered much sooner than
    what the shortest one is: a short horizon decides most of what is away when.
    """

    line: ComputeOrder
    budget: int
    channel: HostLink
    known: NoWaitSchedule
    bound: int
    proven: bool = False
    """Whether the model's optimum is known, and nothing left but what rounding to ticks hides."""

    @property
    def closed(self) -> bool:
        return self.proven or self.known.makespan_ns <= self.bound

    def within(self, most: int, seconds: float) -> bool:
        """Ask for schedules of at most `most` ns; whether an answer came in time."""
        from ortools.sat.python import cp_model

        model = OffloadModel(cp_model.CpModel(), self.line, self.budget, self.channel, most)
        ops = self.known.schedule.ops
        model.build(
            self.bound, frozenset(op.index for op in ops if op.kind is DeviceOpKind.OFFLOAD)
        )
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = seconds
        solver.parameters.num_workers = 1
        solver.parameters.random_seed = 0
        solver.parameters.linearization_level = 2
        status = solver.solve(model.cp)
        none = status == cp_model.INFEASIBLE
        ticks = model.most + 1 if none else int(solver.best_objective_bound)
        self.bound = max(self.bound, min(self.known.makespan_ns, ticks * model.grain))
        if none:
            return True
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return False
        self.proven = status == cp_model.OPTIMAL
        issues = _issues(*model.solution(solver.value), self.channel.duplex)
        found = with_transfers(self.line, issues, self.budget, self.channel)
        if found is None or found.makespan_ns >= self.known.makespan_ns:
            return False
        self.known = found
        return True


def best_known_bound(line: ComputeOrder, budget: int, channel: HostLink) -> int:
    """The best bound known without search."""
    whole = None if channel.duplex else whole_bound(line, budget, channel)
    # The fluid bound is a float: a little less than it cannot be too much.
    return max(paper_bound(line, budget, channel), int((whole or 0) * (1 - 1e-9)))


@dataclass
class _Copy:
    """A copy of a solution, times in ticks; it is issued from `earliest` to before `latest`."""

    begin: int
    op: DeviceOp
    time: int
    due: int
    earliest: int
    latest: int

    @property
    def out(self) -> bool:
        return self.op.kind is DeviceOpKind.OFFLOAD


def _issues(ends: list[int], moves: list[UnitCopies], duplex: bool) -> dict[int, list[DeviceOp]]:
    """Copies in the order of their begins, each behind the operations that had ended by then.

    Operations that take no time do not tell by the clock what comes first; then an offload comes
    before the operation that finds its unit away.
    """
    copies: list[_Copy] = []
    for move in moves:
        unit = move.unit
        offload, prefetch = (
            DeviceOp(DeviceOpKind.OFFLOAD, unit.index),
            DeviceOp(DeviceOpKind.PREFETCH, unit.index),
        )
        copies.append(_Copy(move.out, offload, move.time, move.due, unit.ready, move.first))
        copies.append(_Copy(move.back, prefetch, move.time, move.due, move.last + 1, unit.due))
    copies.sort(key=lambda copy: (copy.begin, not copy.out, copy.latest))
    if not duplex:
        _offloads_first(ends, copies)
    issues: dict[int, list[DeviceOp]] = {}
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
