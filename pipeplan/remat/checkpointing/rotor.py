"""Rotor: the fastest persistent schedule of a chain within a budget, by dynamic programming.

Equations (C1)-(C6) of docs/reference/remat-rules.md; after the recurrence of Rotor in chapter
2.1.2 of X. Zhao's thesis, with inputs and outputs that tapes keep in part.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeplan.remat.arrays import Floats, Ints
from pipeplan.remat.checkpointing.persistent import KEEP, Needs, unroll
from pipeplan.remat.schedules.costs import Costs
from pipeplan.remat.schedules.schedule import DeviceSchedule
from pipeplan.units import ceil_div


def rotor(costs: Costs, budget: int, slots: int = 500) -> DeviceSchedule | None:
    """The fastest persistent schedule whose rounded sizes fit `budget` bytes.

    Args:
        costs: the chain.
        budget: bytes of the device, the static ones included.
        slots: how many units the budget is divided into; every size is rounded up to whole units,
            so the schedule keeps the budget, and with units of one byte it is optimal.

    Returns:
        The schedule, or None where nothing fits after rounding.
    """
    free = budget - costs.static
    if free <= 0:
        return None
    unit = ceil_div(free, slots)
    table = _Table(costs, unit, free // unit)
    table.fill()
    if np.isinf(table.at[0][0, costs.layers - 1, -1]):
        return None
    whole = (0, costs.layers - 1, 0, table.top)
    return DeviceSchedule(
        costs.layers, tuple(unroll(table.decide, whole, table.taken, table.full))
    )


def persistent_schedules(costs: Costs, budget: int, slots: int = 500) -> Iterator[DeviceSchedule]:
    """The fastest schedules of all budgets up to `budget`, fastest first, each time once.

    Args:
        costs: the chain.
        budget: bytes of the device, the static ones included.
        slots: as of `rotor`; the schedules of one table have budgets of whole units.
    """
    free = budget - costs.static
    if free <= 0:
        return
    table = _Table(costs, ceil_div(free, slots), slots)
    table.fill()
    times = table.at[0][0, costs.layers - 1]
    # Times fall as budgets grow: the least budget of each.
    _, least = np.unique(times, return_index=True)
    for units in map(int, least[np.isfinite(times[least])]):
        whole = (0, costs.layers - 1, 0, units)
        ops = unroll(table.decide, whole, table.taken, table.full)
        yield DeviceSchedule(costs.layers, tuple(ops))


class _Table:
    """at[v][s, t, m]: least time of (s, t, v) in m units (C1), plus light forwards before s.

    The added constant turns the sum over the swept layers into a term of the result alone.
    """

    def __init__(self, costs: Costs, unit: int, top: int) -> None:
        self.costs, self.unit, self.top = costs, unit, top
        self.needs = Needs(costs)
        self.full = [self._up(size) for size in costs.boundary]
        self.before = np.concatenate([[0], np.cumsum(costs.light)]).astype(np.float64)
        size = costs.layers
        alike = all(self.needs.residue(s, 0) == self.needs.residue(s, 1) for s in range(size))
        first = np.full((size, size, top + 1), np.inf)
        self.at = (first, first if alike else np.full_like(first, np.inf))
        self.states = (0,) if alike else (0, 1)
        self.sweeps = [self.needs.sweep(s) for s in range(size)]
        self.least = np.full((2, size, size), top + 1, dtype=np.int64)
        self.room = np.empty((size, top + 1))

    def _up(self, size: int) -> int:
        return ceil_div(size, self.unit)

    def taken(self, s: int, v: int) -> int:
        """(C2) in units."""
        return self._up(self.needs.taken(s, v))

    def fill(self) -> None:
        """All subproblems, short ones first at each t."""
        for s in range(self.costs.layers - 1, -1, -1):
            for t in range(s, self.costs.layers):
                for v in self.states:
                    self._solve(s, t, v)

    def _solve(self, s: int, t: int, v: int) -> None:
        row = self.at[v][s, t]
        self._keep(s, t, v, row)
        block = self._splits(s, t, v)
        if block is not None:
            start = self.full[s]
            np.minimum(row[start:], block.min(axis=0) - self.before[s], out=row[start:])
        finite = np.isfinite(row)
        first = int(finite.argmax()) if finite.any() else self.top + 1
        self.least[v, s, t] = first
        if len(self.states) == 1:
            self.least[1, s, t] = first

    def _keep(self, s: int, t: int, v: int, row: Floats) -> None:
        """(C5): run s for its backward, then the rest, then its backward."""
        c = self.costs
        low, own = self._up(self.needs.keep(s, t, v)), float(c.forward[s] + c.backward[s])
        if t == s:
            row[low:] = self.before[s] + own
            return
        low = max(low, self.taken(s, v))
        gone = self.taken(s, v)
        # The rest's table holds the light forwards before s + 1, that of s among them.
        if low <= self.top:
            rest = self.at[1][s + 1, t, low - gone : self.top + 1 - gone]
            row[low:] = rest + (own - c.light[s])

    def _splits(self, s: int, t: int, v: int) -> Floats | None:
        """(C6): one row per next kept boundary s+1..t, one column per m >= the full boundary s."""
        gone = self.full[s]
        if t == s or gone > self.top:
            return None
        wide = self.top + 1 - gone
        block = self.room[: t - s, :wide]
        np.add(self.at[0][s + 1 : t + 1, t, :wide], self.at[v][s, s:t, gone:], out=block)
        run = self.sweeps[s][: t - s] + self.costs.incoming(t)
        need: Ints = -(-run // self.unit) - gone
        have = np.maximum(self.least[0, s + 1 : t + 1, t], self.least[v, s, s:t] - gone)
        for row in np.flatnonzero(need > have):
            block[row, : need[row]] = np.inf
        return block

    def decide(self, s: int, t: int, v: int, m: int) -> int:
        """The decision that gives at[v][s, t, m]."""
        row = np.full(self.top + 1, np.inf)
        self._keep(s, t, v, row)
        block = self._splits(s, t, v)
        if block is None or m < self.full[s]:
            return KEEP
        column = block[:, m - self.full[s]] - self.before[s]
        best = int(column.argmin())
        return KEEP if row[m] <= column[best] else s + 1 + best
