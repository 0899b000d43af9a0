"""Which strategy found what, and after how much work."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

from pipeplan.ilp.clock import SearchClock
from pipeplan.plan import Improvement


@dataclass
class History:
    """Listens to the reports of a whole search and keeps those that say something new."""

    clock: SearchClock
    steps: list[Improvement] = field(default_factory=list)

    def record(self, period: Fraction | None, bound: Fraction, phase: str) -> None:
        """Keep the report if the plan is better or the bound higher than before."""
        new = Improvement(
            work_s=round(self.clock.spent, 3),
            strategy=phase.partition(":")[0],
            period_ns=None if period is None else period.as_integer_ratio(),
            bound_ns=bound.as_integer_ratio() if bound else None,
        )
        last = self.steps[-1] if self.steps else Improvement(work_s=0, strategy="")
        if (last.period_ns, last.bound_ns) != (new.period_ns, new.bound_ns):
            self.steps.append(new)
