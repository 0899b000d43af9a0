"""DYNPROG: which units to offload, optimal where transfers may be interrupted.

(O7)-(O10) of docs/reference/remat-rules.md, after Algorithm 1 of O. Beaumont, L. Eyraud-Dubois, A.
Shilova, *Optimal GPU-CPU Offloading Strategies for Deep Neural Network Training* (2020).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pipeplan.remat.arrays import Ints
from pipeplan.remat.offloading.compute_order import ComputeOrder
from pipeplan.remat.offloading.discretization import DiscretizedOrder, discretize
from pipeplan.remat.offloading.idle_at_loss import idle_at_loss, phases
from pipeplan.remat.offloading.no_wait import NoWaitSchedule
from pipeplan.remat.offloading.selection import UnitSet, ranked_sets
from pipeplan.remat.pareto import StateSet, concatenated, non_dominated
from pipeplan.remat.schedules.host_link import HostLink

FEW, MANY = 256, 100_000
"""States kept by the quick pass that bounds the idle time, and by the pass after it."""
_AT_ONCE = 1024
MOST = 32
"""Sets that idle least of which the fastest without interruptions is taken."""


@dataclass(frozen=True)
class OffloadChoice:
    """Sets of units that idle least, in slots; `exact` where no state was left out."""

    sets: tuple[frozenset[int], ...]
    """The best first, and of the same idle time those that keep most; at most `MOST`."""
    idle: int
    """Of the first."""
    exact: bool


def dynprog(
    line: ComputeOrder, budget: int, channel: HostLink, slots: int = 500
) -> list[tuple[UnitSet, NoWaitSchedule]]:
    """Sets whose offloading idles least with interruptible transfers, sizes in `slots`.

    Each with its no-wait schedule, the shortest of these first. Unit sizes are rounded
    up as sums, which is optimistic; where no choice then fits, sizes of units that the first one
    keeps and that were rounded below are raised, closest first, twice as many each time.

    Returns:
        Nothing where nothing fits after rounding.
    """
    if budget <= line.static or budget < line.least:
        return []
    more = np.zeros(len(line.units), dtype=np.int64)
    step = 1
    while True:
        table = discretize(line, budget, channel, slots, more)
        choice = choose(table)
        if choice is None:
            return []
        found = ranked_sets(line, choice.sets, budget, channel)
        if found:
            return found
        lacking = [
            unit.size - int(size) * table.unit if unit.index not in choice.sets[0] else 0
            for unit, size in zip(line.units, table.size, strict=True)
        ]
        short = sorted((lack, at) for at, lack in enumerate(lacking) if lack > 0)
        if not short:
            return []
        for _, at in short[:step]:
            more[at] += 1
        step *= 2


def choose(table: DiscretizedOrder) -> OffloadChoice | None:
    """The optimum of the program on `table`: a quick pass bounds it, a second one finds it."""
    quick = _Program(table, FEW, None).solve()
    if quick is None or quick.exact:
        return quick
    full = _Program(table, MANY, quick.idle)
    found = full.solve()
    return replace(quick, exact=full.exact) if found is None else found


class _Program:
    """One pass: level j decides on unit j, with the operations between it and the unit before.

    Attributes:
        bound: idle time that an answer must be below, if any.
        exact: whether no state was left out for want of space.
    """

    def __init__(self, table: DiscretizedOrder, most: int, bound: int | None) -> None:
        self.table, self.line, self.most, self.bound = table, table.line, most, bound
        self.exact = True
        total = int(table.size.sum())
        # No slack above what the other phase can have left makes a difference.
        self.limit = int(table.room.max()) + int(table.size.max(initial=0)) + 1
        self.least = total - int(table.spare.min())
        self.history: list[Ints] = []

    def solve(self) -> OffloadChoice | None:
        """All levels, then the turn."""
        line, zero = self.line, np.zeros(1, dtype=np.int64)
        states = StateSet(zero, zero, zero, zero, zero)
        at, end, total = 0, len(line.ops), 0
        for unit, size in zip(line.units, self.table.size.tolist(), strict=True):
            states = self._backward(self._forward(states, at, unit.ready), unit.due, end)
            at, end, total = unit.away, unit.due, total + size
            early = unit.ready < unit.away
            kept, moved = states, states
            if early:
                kept = self._forward(states, unit.ready, at)
                moved = self._forward(states, unit.ready, at, size)
            states = concatenated(_keep(kept, size), _move(moved, 0 if early else size, size))
            states = self._prune(states, at, end, total)
            if not len(states):
                return None
            self.history.append(states.came)
            states = replace(states, came=2 * np.arange(len(states)))
        states = self._backward(self._forward(states, at, line.turn), line.turn, end)
        return self._finish(states)

    def _forward(self, states: StateSet, at: int, end: int, size: int = 0) -> StateSet:
        """(O8) forwards; a unit of `size` may leave from the begin of the one operation on."""
        for op in range(at, end):
            states = states.take(states.kept <= self.table.room[op])
            wait = np.maximum(states.kept + np.maximum(states.a, 0) - self.table.room[op], 0)
            a = (np.maximum(states.a, 0) + size if size else states.a) - wait - self.table.time[op]
            # A unit is in use until its operation ends: nothing comes back before.
            a = np.maximum(a, 0 if size else -self.limit)
            states = replace(states, a=a, idle=states.idle + wait)
        return states

    def _backward(self, states: StateSet, at: int, end: int) -> StateSet:
        """(O8) backwards, from the last operation to the first."""
        for op in range(end - 1, at - 1, -1):
            states = states.take(states.kept <= self.table.room[op])
            wait = np.maximum(states.kept + np.maximum(states.b, 0) - self.table.room[op], 0)
            b = np.maximum(states.b - wait - self.table.time[op], -self.limit)
            states = replace(states, b=b, idle=states.idle + wait)
        return states

    def _prune(self, states: StateSet, at: int, end: int, total: int) -> StateSet:
        """States that may still beat the bound, undominated; the most promising `most` of them."""
        if not len(states):
            return states
        compute = int(self.table.time.sum())
        ahead = int(self.table.time[at:end].sum())
        moved = np.maximum(total - states.kept, self.least)
        least = np.maximum(
            states.idle + np.maximum(states.a + states.b - ahead, 0), 2 * moved - compute
        )
        if self.bound is not None:
            states, least = states.take(least < self.bound), least[least < self.bound]
        if len(states) > 8 * self.most:
            states = states.take(np.argsort(least, kind="stable")[: 8 * self.most])
            self.exact = False
        states = non_dominated(states) if len(states) else states
        if len(states) > self.most:
            least = states.idle + np.maximum(states.a + states.b - ahead, 0)
            states = states.take(np.argsort(least, kind="stable")[: self.most])
            self.exact = False
        return states

    def _finish(self, states: StateSet) -> OffloadChoice | None:
        """(O9) for all last states, best prospects first; of these the `MOST` that idle least."""
        least = states.idle + np.maximum(states.a + states.b, 0)
        order = np.lexsort((-states.kept, least))
        sides = phases(self.table.time, self.table.spare, self.line.turn)
        idles, found = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        for start in range(0, len(order), _AT_ONCE):
            some = order[start : start + _AT_ONCE]
            if len(found) == MOST and least[some[0]] >= idles[-1]:
                break
            part = states.take(some)
            gaps = idle_at_loss(part.kept, part.a, part.b, *sides)
            idles = np.concatenate([idles, part.idle + gaps])
            found = np.concatenate([found, some])
            first = np.lexsort((-states.kept[found], idles))[:MOST]
            idles, found = idles[first], found[first]
        if not len(found) or (self.bound is not None and idles[0] >= self.bound):
            return None
        sets = dict.fromkeys(self._chosen(int(states.came[at]) // 2) for at in found)
        return OffloadChoice(tuple(sets), int(idles[0]), self.exact)

    def _chosen(self, state: int) -> frozenset[int]:
        found = []
        for unit, came in zip(reversed(self.line.units), reversed(self.history), strict=True):
            state, moved = divmod(int(came[state]), 2)
            if moved:
                found.append(unit.index)
        return frozenset(found)


def _keep(states: StateSet, size: int) -> StateSet:
    return replace(states, kept=states.kept + size)


def _move(states: StateSet, ahead: int, behind: int) -> StateSet:
    """Offload a unit: `ahead` slots join the offloads, `behind` slots the prefetches."""
    a = np.maximum(states.a, 0) + ahead if ahead else states.a
    return replace(states, a=a, b=np.maximum(states.b, 0) + behind, came=states.came + 1)
