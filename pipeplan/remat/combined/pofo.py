"""POFO: what to keep, to run again and to offload, together.

(P6)-(P9) of docs/reference/remat-rules.md; derived anew from Theorem 1 of POFO (O. Beaumont, L.
Eyraud-Dubois, A. Shilova, *Efficient Combination of Rematerialization and Offloading for Training
DNNs* (2021)).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pipeplan.remat.arrays import Ints
from pipeplan.remat.combined.pofo_inner import InnerTable, ceil_slots, scale_of
from pipeplan.remat.pareto import StateSet, concatenated, non_dominated
from pipeplan.remat.schedules.costs import Costs
from pipeplan.remat.schedules.host_link import HostLink
from pipeplan.remat.schedules.schedule import DeviceOp, DeviceOpKind, DeviceSchedule

FEW, MANY = 100, 2000
"""States kept at a boundary by the quick pass that bounds the time, and by the pass after it."""


@dataclass(frozen=True)
class Pofo:
    """Operations without transfers, the units to offload, and the time the program expects."""

    base: DeviceSchedule
    units: frozenset[int]
    time_ns: float


@dataclass(frozen=True)
class _Step:
    """How a boundary was reached: from which one, and whether that one's unit is offloaded."""

    s: int
    v: int
    moved: bool


def pofo(costs: Costs, budget: int, channel: HostLink, slots: int = 50) -> Pofo | None:
    """The fastest combination in the model of (P6)-(P9), sizes rounded up to `slots`.

    Returns:
        None where nothing fits after rounding.
    """
    if budget <= costs.static:
        return None
    inner = InnerTable(costs, scale_of(costs, budget, channel, slots))
    inner.fill()
    quick = _Forward(costs, inner, FEW, np.inf).solve()
    if quick is None:
        return None
    return _Forward(costs, inner, MANY, quick.time_ns * inner.scale.per_ns).solve() or quick


class _Forward:
    """The forward phase: states at each boundary, kept boundary by kept boundary.

    In `StateSet`, `kept` is what no longer is free of the slots, `a` what is to offload still, `b`
    what must be back before the backward phase comes here, `idle` the time of both phases.
    """

    def __init__(self, costs: Costs, inner: InnerTable, most: int, bound: float) -> None:
        self.costs, self.inner, self.scale = costs, inner, inner.scale
        self.most, self.bound = most, bound
        both_ways = inner.forward + inner.backward
        self.ahead = np.concatenate([np.cumsum(both_ways[::-1])[::-1], [0.0]])
        self.reached: dict[tuple[int, int], list[tuple[StateSet, _Step | None]]] = {}
        self.settled: dict[tuple[int, int], tuple[StateSet, list[_Step | None], Ints]] = {}

    def solve(self) -> Pofo | None:
        """All boundaries in order, then the best way back."""
        zero = np.zeros(1, dtype=np.int64)
        start = StateSet(zero, zero, zero, np.zeros(1), zero)
        self.reached[0, 0] = [(start, None)]
        last = self.costs.layers - 1
        best = (self.bound, -1, -1)
        for s in range(last + 1):
            for v in (0, 1):
                if (s, v) not in self.reached:
                    continue
                states = self._settle(s, v)
                if s < last:
                    self._expand(s, v, states)
                    continue
                ends = self._end(v, states)
                where = int(ends.argmin())
                if ends[where] < best[0]:
                    best = (float(ends[where]), v, where)
        return None if best[1] < 0 else self._unroll(*best)

    def _settle(self, s: int, v: int) -> StateSet:
        """The undominated states at (s, v), whatever way they came."""
        parts = self.reached.pop((s, v))
        states, which = parts[0][0], [np.zeros(len(parts[0][0]), dtype=np.int64)]
        for number, (part, _) in enumerate(parts[1:], start=1):
            states = concatenated(states, part)
            which.append(np.full(len(part), number))
        came, origin = states.came, np.concatenate(which)
        states = non_dominated(replace(states, came=np.arange(len(states))))
        if len(states) > self.most:
            order = np.argsort(self._least(s, states), kind="stable")
            states = states.take(order[: self.most])
        self.settled[s, v] = (
            replace(states, came=came[states.came]),
            [step for _, step in parts],
            origin[states.came],
        )
        return replace(states, came=np.arange(len(states)))

    def _reach(self, s: int, v: int, states: StateSet, step: _Step) -> None:
        room = self.scale.top - states.kept
        fits = (states.a <= room) & (states.b <= room) & (self._least(s, states) < self.bound)
        if fits.any():
            self.reached.setdefault((s, v), []).append((states.take(fits), step))

    def _least(self, s: int, states: StateSet) -> np.ndarray:
        """What the whole takes at least: computation ahead, or what the channel has to move."""
        found: np.ndarray = states.idle + np.maximum(self.ahead[s], states.a + states.b)
        return found

    def _rest(self, s: int, v: int) -> int:
        """Bytes of the tape of layer s - 1 that belong to unit s."""
        return self.costs.saved[s - 1] if v else 0

    def _own(self, s: int, v: int, states: StateSet) -> tuple[Ints, Ints, Ints]:
        """(P7): time of the forward and of the backward of layer s, and whether both fit."""
        c, up_slots = self.costs, self.scale.up
        rest, needs = self._rest(s, v), self.inner.needs
        ahead = up_slots(rest + c.boundary[s] + c.saved[s] + c.forward_work[s] + c.boundary[s + 1])
        behind = up_slots(
            rest + needs.taken(s, v) + c.saved_output[s] + c.gradient[s] + c.backward_work[s]
            + c.gradient_in(s)
        )  # fmt: skip
        m = self.scale.top - states.kept
        forward = self.inner.forward[s] + np.maximum(ahead - m + states.a, 0)
        backward = self.inner.backward[s] + np.maximum(behind - m + states.b, 0)
        fits = np.where(m >= max(ahead, behind), 0.0, np.inf)
        return forward, backward, fits

    def _expand(self, s: int, v: int, states: StateSet) -> None:
        c = self.costs
        kept = self._rest(s, v) + self.inner.needs.residue(s, v)
        forward, backward, fits = self._own(s, v, states)
        idle = states.idle + forward + backward + fits
        early = self.inner.needs.residue(s, v) == c.boundary[s]
        for moved in (False, True) if kept else (False,):
            size = self.scale.up(kept)
            a = ceil_slots(states.a + (size if moved and early else 0) - forward)
            b = ceil_slots(states.b - backward)
            after = replace(
                states,
                kept=states.kept + (0 if moved else size),
                a=a + (size if moved and not early else 0),
                b=b + (size if moved else 0),
                idle=idle,
            )
            self._reach(s + 1, 1, after, _Step(s, v, moved))
        for moved in (False, True):
            self._segments(s, v, states, moved)

    def _segments(self, s: int, v: int, states: StateSet, moved: bool) -> None:
        """(P8): keep boundary s in full and go on to each later boundary without tapes."""
        c, inner, scale = self.costs, self.inner, self.scale
        rest = self._rest(s, v)
        size = scale.up(rest + c.boundary[s])
        m = scale.top - states.kept
        own = m - scale.up(rest)
        fits = (own >= 0) & (
            m >= scale.up(rest + c.boundary[s] + c.light_work[s] + c.boundary[s + 1])
        )
        states, m, own = states.take(fits), m[fits], own[fits]
        first = scale.up(rest + c.boundary[s] + c.light_work[s] + c.boundary[s + 1])
        wait = np.maximum(first - m + states.a, 0).astype(np.float64)
        a = states.a + (size if moved else 0)
        beside = 0 if moved else rest + c.boundary[s]
        for end in range(s + 1, c.layers):
            if end > s + 1:
                k = end - 1
                need = scale.up(beside + c.boundary[k] + c.light_work[k] + c.boundary[k + 1])
                fits = m >= need
                states, m, own, wait, a = (
                    states.take(fits), m[fits], own[fits], wait[fits], a[fits],
                )  # fmt: skip
                wait = np.maximum(wait, need - m + a - (inner.begun[k] - inner.begun[s]))
            if not len(states):
                return
            forward = inner.begun[end] - inner.begun[s] + wait
            again = inner.at[v][s, end - 1, own, states.b].astype(np.float64)
            after = replace(
                states,
                kept=states.kept + (0 if moved else size),
                a=ceil_slots(a - forward),
                b=ceil_slots(states.b - again) + (size if moved else 0),
                idle=states.idle + forward + again,
            )
            self._reach(end, 0, after, _Step(s, v, moved))

    def _end(self, v: int, states: StateSet) -> np.ndarray:
        """(P9): the last layer, and what is still to move between its forward and backward."""
        forward, backward, fits = self._own(self.costs.layers - 1, v, states)
        left = np.maximum(states.a - forward, 0) + np.maximum(states.b - backward, 0)
        total: np.ndarray = states.idle + forward + backward + left + fits
        return total

    def _unroll(self, time: float, v: int, where: int) -> Pofo:
        """The operations and units behind the best state."""
        last = s = self.costs.layers - 1
        ahead = [[DeviceOp(DeviceOpKind.KEEP_ALL, last), DeviceOp(DeviceOpKind.FREE, last + 1)]]
        behind = [DeviceOp(DeviceOpKind.BACKWARD, last)]
        units = []
        while True:
            states, steps, origin = self.settled[s, v]
            step = steps[int(origin[where])]
            if step is None:
                break
            where, end, by_tape = int(states.came[where]), s, v == 1
            s, v = step.s, step.v
            if step.moved:
                units.append(s)
            if by_tape:
                ahead.append([DeviceOp(DeviceOpKind.KEEP_ALL, s)])
                behind.append(DeviceOp(DeviceOpKind.BACKWARD, s))
            else:
                sweep = [DeviceOp(DeviceOpKind.KEEP_NOTHING, k) for k in range(s + 1, end)]
                ahead.append([DeviceOp(DeviceOpKind.KEEP_INPUT, s), *sweep])
                before = self.settled[s, v][0]
                own = self.scale.top - int(before.kept[where]) - self.scale.up(self._rest(s, v))
                behind += self.inner.ops(s, end - 1, v, own, int(before.b[where]))
        ops = [op for part in reversed(ahead) for op in part] + behind
        base = DeviceSchedule(self.costs.layers, tuple(ops))
        return Pofo(base, frozenset(units), time / self.scale.per_ns)
