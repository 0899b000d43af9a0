"""Offloading with interruptible transfers as linear programs: what planners must equal.

Times are counted in the bytes that the channel moves meanwhile; one transfer at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, combinations

from ortools.linear_solver import pywraplp

from pipeplan.remat.offloading.compute_order import ComputeOrder, OffloadUnit


def fractional(line: ComputeOrder, budget: int) -> float | None:
    """Least time where any part of any unit may be moved; None if the budget is too small."""
    return _solve(line, budget, line.units, None)


def interruptible(line: ComputeOrder, budget: int, ordered: bool = True) -> float | None:
    """Least time where whole units are moved, each in as many parts as wanted.

    `ordered`: nothing comes back before everything has left.
    """
    sizes = range(len(line.units) + 1)
    times = []
    for units in chain.from_iterable(combinations(line.units, size) for size in sizes):
        free = 2 * max((unit.away for unit in units), default=0)
        due = 2 * min((unit.due for unit in units), default=0)
        for switch in range(free, due + 1) if ordered and units else [None]:
            times.append(_solve(line, budget, units, (switch,)))
    return min((time for time in times if time is not None), default=None)


def _solve(
    line: ComputeOrder, budget: int, units: Sequence[OffloadUnit], whole: tuple[int | None] | None
) -> float | None:
    """`whole`: all of `units` moves, with its entry the interval from which on things come back.

    Interval 2 * i is the gap before operation i, interval 2 * i + 1 the operation itself.
    """
    solver = pywraplp.Solver.CreateSolver("GLOP")
    size = sum(unit.size for unit in units)
    total = size if whole else solver.NumVar(0, float(size), "")
    switch = whole[0] if whole else None
    out_sum = back_sum = 0 * solver.NumVar(0, 0, "")
    gaps = []
    for at, time in enumerate(line.time):
        lacking = int(line.need[at]) - budget
        gaps.append(solver.NumVar(0, solver.infinity(), ""))
        for interval, length in ((2 * at, gaps[-1]), (2 * at + 1, float(time))):
            if interval % 2:
                solver.Add(out_sum - back_sum >= lacking)
                if at >= line.turn:
                    # What it uses must be back: only units that are due later may be away.
                    later = sum(u.size for u in units if u.due > at)
                    solver.Add(total - back_sum <= later)
            out, back = (solver.NumVar(0, solver.infinity(), "") for _ in range(2))
            solver.Add(out + back <= length)
            out_sum, back_sum = out_sum + out, back_sum + back
            solver.Add(out_sum <= sum(u.size for u in units if u.ready <= at))
            solver.Add(back_sum <= out_sum)
            solver.Add(out_sum <= total)
            if interval % 2:
                solver.Add(out_sum - back_sum >= lacking)
            if switch is not None and interval < switch:
                solver.Add(back == 0)
            if interval == switch:
                solver.Add(out_sum == total)
    solver.Minimize(sum(gaps))
    if solver.Solve() != pywraplp.Solver.OPTIMAL:
        return None
    return float(line.time.sum()) + solver.Objective().Value()
