"""Which strategy found what, and after how much work."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from pipeplan.ilp.clock import SearchClock


@dataclass(frozen=True, slots=True)
class Improvement:
    """A better plan or a higher bound.

    Attributes:
        work_s: Seconds of the limit that were used; work where that is what counts.
        strategy: The strategy or prover that ran.
        period: The best plan's, per micro-batch in ns; None as long as there is none.
        bound: The bound that the gap uses, per micro-batch in ns.
    """

    work_s: float
    strategy: str
    period: Fraction | None
    bound: Fraction


@dataclass
class History:
    """Listens to the reports of a whole search and keeps those that say something new."""

    clock: SearchClock
    steps: list[Improvement] = field(default_factory=list)

    def record(self, period: Fraction | None, bound: Fraction, phase: str) -> None:
        """Keep the report if the plan is better or the bound higher than before."""
        strategy = phase.partition(":")[0]
        if self.steps:
            last = self.steps[-1]
            if (last.period, last.bound) == (period, bound):
                return
        elif period is None and not bound:
            return
        self.steps.append(Improvement(round(self.clock.spent, 3), strategy, period, bound))
