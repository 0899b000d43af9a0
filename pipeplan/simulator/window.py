"""Where a run is filling, steady and draining."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from pipeplan.plan import OpKind
from pipeplan.simulator.engine import Times
from pipeplan.simulator.planned import Planned
from pipeplan.simulator.tape import number


@dataclass(frozen=True, slots=True)
class Window:
    """Instants in ns. The run fills until `first_exit` and drains after `last_entry`."""

    first_exit: int
    """When the first micro-batch has passed its last backward."""
    last_entry: int
    """When the last micro-batch before the drain starts its first forward."""
    measured: tuple[int, int] | None
    """Between two exits in steady state, a whole number of periods apart."""
    period_ns: Fraction | None
    """Of k micro-batches, the mean over `measured`."""
    frame: tuple[int, int] | None
    """On the plan clock: one period [n * T, (n + 1) * T) in which every op of it happens."""

    @classmethod
    def of(cls, times: Times, k: int, flow: int, every: int, planned: Planned | None) -> Window:
        """The window of a finished run.

        Args:
            times: the run.
            k: micro-batches of one period.
            flow: micro-batches that enter without a drain between them.
            every: the run repeats itself after this many micro-batches, if long enough.
            planned: the timetable, on the plan clock.
        """
        entries = times.start[number(OpKind.F, 0)][:flow]
        exits = times.end[times.ops.backward(0)][:flow]
        first, last = exits[0] if exits else None, entries[-1] if entries else None
        if first is None or last is None:
            return cls(0, 0, None, None, None)
        frame = None
        if planned is not None and flow >= k * planned.least(times.ops):
            begin = (planned.depth(times.ops) + 1) * planned.period
            frame = (begin, begin + planned.period)
        steady = [m for m, exit_ in enumerate(exits) if exit_ is not None and exit_ <= last]
        unit = lcm(k, every) if steady and steady[-1] >= lcm(k, every) else k
        until = steady[-1] // unit * unit if steady else 0
        since = until // 2 // unit * unit
        begin_exit, end_exit = exits[since], exits[until]
        if since == until or begin_exit is None or end_exit is None:
            return cls(first, last, None, None, frame)
        period = Fraction(k * (end_exit - begin_exit), until - since)
        return cls(first, last, (begin_exit, end_exit), period, frame)
