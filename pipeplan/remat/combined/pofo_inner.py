"""Rematerialization while the channel brings units back: the inner table of POFO.

(P1)-(P5) of docs/reference/remat-rules.md; derived anew from Theorem 1 and Lemma 1 of POFO (O.
Beaumont, L. Eyraud-Dubois, A. Shilova, *Efficient Combination of Rematerialization and Offloading
for Training DNNs* (2021)). Times are counted in the slots that the channel moves meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeplan.remat.checkpointing.persistent import KEEP, Needs
from pipeplan.remat.schedules.costs import Costs
from pipeplan.remat.schedules.host_link import HostLink
from pipeplan.remat.schedules.schedule import DeviceOp, DeviceOpKind
from pipeplan.units import ceil_div

Singles = npt.NDArray[np.float32]
_SECOND = 10**9
_INSTANT = 10**18
"""Bytes per second that stand for a channel without a limit."""
_NEAR = 1e-3
"""Part of a slot that rounding up forgives: single precision in sums of times."""


def ceil_slots(values: npt.ArrayLike) -> npt.NDArray[np.intp]:
    """Whole slots, not less than `values` and none below 0."""
    whole: npt.NDArray[np.intp] = np.ceil(np.maximum(np.asarray(values) - _NEAR, 0)).astype(
        np.intp
    )
    return whole


@dataclass(frozen=True)
class SlotScale:
    """Slots: their bytes, how many there are, and how long a ns is in them."""

    unit: int
    top: int
    per_ns: float

    def up(self, size: int) -> int:
        """`size` bytes in slots."""
        return ceil_div(size, self.unit)


def scale_of(costs: Costs, budget: int, channel: HostLink, slots: int) -> SlotScale:
    """`budget`, less what is always there, in `slots`."""
    unit = ceil_div(budget - costs.static, slots)
    per_ns = (channel.bandwidth or _INSTANT) / (unit * _SECOND)
    return SlotScale(unit, (budget - costs.static) // unit, per_ns)


class InnerTable:
    """at[v][s, t, m, d]: least time of (s, t, v) in m slots, d of them filled by its end (P1)."""

    def __init__(self, costs: Costs, scale: SlotScale) -> None:
        self.costs, self.scale, self.needs = costs, scale, Needs(costs)
        size, wide = costs.layers, scale.top + 1
        self.forward = np.array(costs.forward, dtype=np.float64) * scale.per_ns
        self.backward = np.array(costs.backward, dtype=np.float64) * scale.per_ns
        light = np.array(costs.light, dtype=np.float64) * scale.per_ns
        self.begun = np.concatenate([[0.0], np.cumsum(light)])
        alike = all(self.needs.residue(s, 0) == self.needs.residue(s, 1) for s in range(size))
        first = np.full((size, size, wide, wide), np.inf, dtype=np.float32)
        self.at = (first, first if alike else np.full_like(first, np.inf))
        self.states = (0,) if alike else (0, 1)
        self.m = np.arange(wide, dtype=np.float32)[:, None]
        self.d = np.arange(wide, dtype=np.float32)[None, :]

    def fill(self) -> None:
        """All subproblems but those with the last layer, which the forward phase solves itself."""
        for s in range(self.costs.layers - 2, -1, -1):
            for t in range(s, self.costs.layers - 1):
                for v in self.states:
                    best = self._keep(s, t, v)
                    splits = self._splits(s, t, v)
                    if splits is not None:
                        np.minimum(best, splits.min(axis=0), out=best)
                    self.at[v][s, t] = best

    def _keep(self, s: int, t: int, v: int) -> Singles:
        """(P2): run s for its backward, the rest, its backward."""
        c, scale = self.costs, self.scale
        ahead = scale.up(
            c.boundary[s] + c.saved[s] + c.forward_work[s] + c.boundary[s + 1] + c.incoming(t)
        )
        behind = self._behind(s, v)
        last = self.backward[s] + np.maximum(behind - self.m + self.d, 0)
        left = np.maximum(self.d - last, 0)
        total = np.where(self.m >= max(ahead, behind), last, np.inf).astype(np.float32)
        if t > s:
            gone = scale.up(self.needs.taken(s, v))
            inner = np.full_like(total, np.inf)
            if gone <= scale.top:
                table = self.at[1][s + 1, t, : scale.top + 1 - gone]
                inner[gone:] = np.take_along_axis(table, ceil_slots(left[gone:]), axis=1)
            left = np.maximum(ceil_slots(left) - inner, 0)
            total += inner
        total += self.forward[s] + np.maximum(ahead - self.m + left, 0)
        return total

    def _splits(self, s: int, t: int, v: int) -> Singles | None:
        """(P3): one table per next kept boundary s + 1..t."""
        gone, top = self.scale.up(self.costs.boundary[s]), self.scale.top
        if t == s or gone > top:
            return None
        most, tight = self._sweep(s, t)
        end = self.at[v][s, s:t, gone:]
        middle = self.at[0][s + 1 : t + 1, t, : top + 1 - gone]
        left = ceil_slots(self.d - end)
        again = np.take_along_axis(middle, left, axis=2)
        late = np.maximum(left - again, 0)
        late += tight[:, None, None] - self.m[gone:]
        np.maximum(late, 0, out=late)
        late += again
        late += end
        late += (self.begun[s + 1 : t + 1] - self.begun[s])[:, None, None].astype(np.float32)
        late[self.m[None, gone:, 0] < most[:, None]] = np.inf
        result = np.full((t - s, top + 1, top + 1), np.inf, dtype=np.float32)
        result[:, gone:] = late
        return result

    def _sweep(self, s: int, t: int) -> tuple[npt.NDArray[np.int64], Singles]:
        """(P4) for each end: the largest need, and the largest less what is moved behind it."""
        c, scale = self.costs, self.scale
        kept = c.boundary[s] + c.incoming(t)
        needs = [c.light_work[s] + c.boundary[s + 1]]
        needs += [c.boundary[k] + c.light_work[k] + c.boundary[k + 1] for k in range(s + 1, t)]
        slots = np.array([scale.up(kept + need) for need in needs], dtype=np.int64)
        ends = self.begun[s + 1 : t + 1]
        tight = np.maximum.accumulate(slots + ends) - ends
        return np.maximum.accumulate(slots), tight.astype(np.float32)

    def decide(self, s: int, t: int, v: int, m: int, d: int) -> int:
        """The decision behind at[v][s, t, m, d]."""
        keep = float(self._keep(s, t, v)[m, d])
        splits = self._splits(s, t, v)
        if splits is None:
            return KEEP
        best = int(splits[:, m, d].argmin())
        return KEEP if keep <= splits[best, m, d] else s + 1 + best

    def ops(self, s: int, t: int, v: int, m: int, d: int) -> list[DeviceOp]:
        """The operations of the subproblem."""
        found: list[DeviceOp] = []
        todo: list[DeviceOp | tuple[int, int, int, int, int]] = [(s, t, v, m, d)]
        while todo:
            item = todo.pop()
            if isinstance(item, DeviceOp):
                found.append(item)
                continue
            s, t, v, m, d = item
            cut = self.decide(s, t, v, m, d)
            if cut == KEEP:
                found.append(DeviceOp(DeviceOpKind.KEEP_ALL, s))
                todo.append(DeviceOp(DeviceOpKind.BACKWARD, s))
                gone = self.scale.up(self.needs.taken(s, v))
                inside = (s + 1, t, 1, m - gone, self._before_backward(s, v, m, d))
                todo.append(inside if t > s else DeviceOp(DeviceOpKind.FREE, s + 1))
            else:
                found.append(DeviceOp(DeviceOpKind.KEEP_INPUT, s))
                found += [DeviceOp(DeviceOpKind.KEEP_NOTHING, k) for k in range(s + 1, cut)]
                left = int(ceil_slots(np.float32(d) - self.at[v][s, cut - 1, m, d]))
                todo.append((s, cut - 1, v, m, d))
                todo.append((cut, t, 0, m - self.scale.up(self.costs.boundary[s]), left))
        return found

    def _behind(self, s: int, v: int) -> int:
        """Slots of the backward of layer s."""
        c, taken = self.costs, self.needs.taken(s, v)
        work = c.saved_output[s] + c.gradient[s] + c.backward_work[s]
        return self.scale.up(taken + work + c.gradient_in(s))

    def _before_backward(self, s: int, v: int, m: int, d: int) -> int:
        """Slots still to come back ahead of the backward of layer s, which ends with d there."""
        wait = max(0, self._behind(s, v) - m + d)
        return int(ceil_slots(np.float32(d) - np.float32(self.backward[s] + wait)))
