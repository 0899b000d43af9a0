"""The incumbent over all contracted chains: the best plan, whatever it recomputes."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.incumbent import Incumbent, Report
from pipeplan.ilp.objective import cost
from pipeplan.ilp.recompute.contracted_chain import ContractedChain
from pipeplan.ilp.recompute.search_result import SearchResult
from pipeplan.ilp.schedule import Schedule


@dataclass
class JointIncumbent:
    """What all parts of a search with recomputation share.

    Attributes:
        state: Of the chain as it is: clock, limits, and what is proven of every plan.
        best: The shortest plan found of any contracted chain.
        report: Who listens.
        interrupted: Whether the user ended the search (Ctrl-C).
        contiguous: Period per micro-batch of the best contiguous schedule of any of them.
    """

    state: Incumbent
    best: SearchResult
    report: Report | None = None
    interrupted: bool = False
    contiguous: Fraction | None = None

    def __post_init__(self) -> None:
        """Whatever is told of the whole is told with the best plan."""
        self.state.report = self.on_report

    @property
    def period(self) -> Fraction | None:
        """Of the best plan, per micro-batch."""
        schedule = self.best.state.best
        return None if schedule is None else schedule.per_microbatch

    @property
    def done(self) -> bool:
        """Whether the time is over, or nothing more is wanted."""
        return self.state.remaining <= 0 or self.closed

    @property
    def closed(self) -> bool:
        """Whether the gap asked for is reached, or the user has enough."""
        gap = self._gap(self.period)
        return self.interrupted or (gap is not None and gap <= self.state.options.gap)

    def take(self, solved: SearchResult, *, equal: bool = False) -> None:
        """Keep the better one; the new one where both are `equal`, if that is asked for."""
        self.interrupted |= solved.state.phase == "interrupted"
        known = [each for each in (self.contiguous, solved.state.contiguous) if each is not None]
        self.contiguous = min(known, default=None)
        if solved.cost < self.best.cost or (equal and solved.cost == self.best.cost):
            self.best = solved

    def offer(self, contracted: ContractedChain, costs: CostModel, schedule: Schedule) -> bool:
        """Whether a schedule of a contracted chain fits; it is kept if it is the best.

        Args:
            contracted: the chain.
            costs: of that chain.
            schedule: one that keeps (R2)-(R5); what must leave to the host is found here, if it
                would be the best.
        """
        inner = Incumbent(costs, self.state.options)
        if cost(costs, schedule, inner.options.microbatches) >= self.best.cost:
            return inner.is_feasible(schedule)
        if not inner.offer(schedule):
            return False
        inner.phase, inner.report = self.state.phase, self.on_report
        self.take(SearchResult(inner, contracted))
        inner.notify()
        return True

    def on_report(
        self,
        seconds: float,
        period: Fraction | None,
        bound: Fraction,
        gap: float | None,
        phase: str,
    ) -> None:
        """Pass a part's report on, as one of the whole: the best plan of all, and its bound."""
        known = [each for each in (period, self.period) if each is not None]
        best = min(known, default=None)
        if self.report:
            self.report(seconds, best, self.state.bound, self._gap(best), phase)

    def _gap(self, period: Fraction | None) -> float | None:
        bound = self.state.bound
        return float((period - bound) / bound) if period is not None and bound else None
