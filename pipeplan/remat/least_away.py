"""The least memory with recomputation and offloading: (P10) of docs/reference/remat-rules.md."""

from __future__ import annotations

from pipeplan.remat.channel import Channel
from pipeplan.remat.costs import Costs
from pipeplan.remat.least import Least
from pipeplan.remat.line import line_of
from pipeplan.remat.nowait import no_wait
from pipeplan.remat.schedule import Op, OpKind, Schedule


def least_with_host(costs: Costs, channel: Channel) -> Schedule | None:
    """A schedule of least peak among those that offload all that waits for the backward phase."""
    base = Schedule(costs.layers, tuple(_Phase(costs).ops()))
    line = line_of(costs, base)
    timed = no_wait(line, {unit.index for unit in line.units}, line.least, channel)
    return None if timed is None else timed.schedule


class _Phase:
    """(P10): least memory from each boundary on, and the boundary kept next."""

    def __init__(self, costs: Costs) -> None:
        self.costs, self.inner = costs, Least(costs)
        self.best: dict[tuple[int, int], tuple[int, int]] = {}
        for s in range(costs.layers - 1, -1, -1):
            for v in (0, 1):
                self.best[s, v] = min([self._keep(s, v), *self._segments(s, v)])

    def _rest(self, s: int, v: int) -> int:
        return self.costs.saved[s - 1] if v and s else 0

    def _keep(self, s: int, v: int) -> tuple[int, int]:
        own = self._rest(s, v) + self.inner.needs.keep(s, self.costs.layers - 1, v)
        rest = self.best[s + 1, 1][0] if s + 1 < self.costs.layers else 0
        return max(own, rest), s

    def _segments(self, s: int, v: int) -> list[tuple[int, int]]:
        c, rest = self.costs, self._rest(s, v)
        sweep, found = rest + c.boundary[s] + c.light_work[s] + c.boundary[s + 1], []
        for end in range(s + 1, c.layers):
            if end > s + 1:
                k = end - 1
                sweep = max(sweep, c.boundary[k] + c.light_work[k] + c.boundary[k + 1])
            again = rest + int(self.inner.at[v, s, end - 1])
            found.append((max(sweep, again, self.best[end, 0][0]), end))
        return found

    def ops(self) -> list[Op]:
        """The operations, nothing of them offloaded."""
        ahead: list[Op] = []
        behind: list[list[Op]] = []
        s = v = 0
        while s < self.costs.layers:
            end = self.best[s, v][1]
            if end == s:
                ahead.append(Op(OpKind.KEEP_ALL, s))
                behind.append([Op(OpKind.BACKWARD, s)])
                s, v = s + 1, 1
            else:
                ahead.append(Op(OpKind.KEEP_INPUT, s))
                ahead += [Op(OpKind.KEEP_NOTHING, k) for k in range(s + 1, end)]
                behind.append(self.inner.ops(s, end - 1, v))
                s, v = end, 0
        ahead.append(Op(OpKind.FREE, self.costs.layers))
        return ahead + [op for part in reversed(behind) for op in part]
