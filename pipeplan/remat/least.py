"""The smallest memory any persistent schedule needs, and a schedule that needs no more."""

from __future__ import annotations

import numpy as np

from pipeplan.remat.costs import Costs
from pipeplan.remat.persistent import KEEP, Ints, Needs, unroll
from pipeplan.remat.schedule import Schedule


def least_memory(costs: Costs) -> Schedule:
    """A persistent schedule of least peak: W(0, L-1, 0) of (C7), in O(L^3) and exact bytes.

    Its peak, as the judge counts it, is the smallest feasible budget without offloading.
    """
    needs, size = Needs(costs), costs.layers
    table = np.zeros((2, size, size), dtype=np.int64)
    sweeps = [needs.sweep(s) for s in range(size)]

    def splits(s: int, t: int, v: int) -> Ints:
        """Least memory for each next kept boundary s+1..t."""
        run = sweeps[s][: t - s] + costs.incoming(t)
        right = table[0, s + 1 : t + 1, t] + costs.boundary[s]
        result: Ints = np.maximum(np.maximum(run, right), table[v, s, s:t])
        return result

    def keep(s: int, t: int, v: int) -> int:
        own = needs.keep(s, t, v)
        return max(own, needs.taken(s, v) + int(table[1, s + 1, t])) if t > s else own

    for s in range(size - 1, -1, -1):
        for t in range(s, size):
            for v in (0, 1):
                best = keep(s, t, v)
                if t > s:
                    best = min(best, int(splits(s, t, v).min()))
                table[v, s, t] = best

    def decide(s: int, t: int, v: int, _: int) -> int:
        if table[v, s, t] == keep(s, t, v):
            return KEEP
        return s + 1 + int(splits(s, t, v).argmin())

    return unroll(costs, decide, 0, lambda _s, _v: 0, [0] * (size + 1))
