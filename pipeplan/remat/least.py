"""The smallest memory any persistent schedule needs, and a schedule that needs no more."""

from __future__ import annotations

import numpy as np

from pipeplan.remat.costs import Costs
from pipeplan.remat.persistent import KEEP, Ints, Needs, unroll
from pipeplan.remat.schedule import Op, Schedule


def least_memory(costs: Costs) -> Schedule:
    """A persistent schedule of least peak: W(0, L-1, 0) of (C7), in O(L^3) and exact bytes.

    Its peak, as the judge counts it, is the smallest feasible budget without offloading.
    """
    return Schedule(costs.layers, tuple(Least(costs).ops(0, costs.layers - 1, 0)))


class Least:
    """at[v, s, t]: (C7) for every run of layers, with the operations that need no more."""

    def __init__(self, costs: Costs) -> None:
        self.costs, self.needs, size = costs, Needs(costs), costs.layers
        self.at = np.zeros((2, size, size), dtype=np.int64)
        self._sweeps = [self.needs.sweep(s) for s in range(size)]
        for s in range(size - 1, -1, -1):
            for t in range(s, size):
                for v in (0, 1):
                    best = self._keep(s, t, v)
                    if t > s:
                        best = min(best, int(self._splits(s, t, v).min()))
                    self.at[v, s, t] = best

    def _keep(self, s: int, t: int, v: int) -> int:
        own = self.needs.keep(s, t, v)
        return max(own, self.needs.taken(s, v) + int(self.at[1, s + 1, t])) if t > s else own

    def _splits(self, s: int, t: int, v: int) -> Ints:
        """Least memory for each next kept boundary s+1..t."""
        run = self._sweeps[s][: t - s] + self.costs.incoming(t)
        right = self.at[0, s + 1 : t + 1, t] + self.costs.boundary[s]
        result: Ints = np.maximum(np.maximum(run, right), self.at[v, s, s:t])
        return result

    def _decide(self, s: int, t: int, v: int, _: int) -> int:
        if self.at[v, s, t] == self._keep(s, t, v):
            return KEEP
        return s + 1 + int(self._splits(s, t, v).argmin())

    def ops(self, s: int, t: int, v: int) -> list[Op]:
        """The operations of layers s..t from the full boundary s."""
        none = [0] * (self.costs.layers + 1)
        return unroll(self._decide, (s, t, v, 0), lambda _s, _v: 0, none)
