"""What is asked of a graph, and what is known of it while methods search."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from pipeplan.remat.graph.blocks.chain import BlockChain
from pipeplan.remat.graph.hierarchy.h_partition import Sizes
from pipeplan.remat.graph.hierarchy.hierarchy import Hierarchy
from pipeplan.remat.graph.intervals.search import SearchLimits
from pipeplan.remat.graph.intervals.slots import Slots, runs_of
from pipeplan.remat.graph.ledger import Ledger, Order
from pipeplan.remat.graph.orders import further, peak_bytes, saved_bytes
from pipeplan.remat.graph.problem import Budget, GraphProblem

TOPS = (30, 60)
"""Clusters of HiRemate's highest level: an encoder-decoder has better plans with fewer, a U-Net
with more."""


@dataclass(frozen=True, slots=True)
class _KnownOrder:
    """An order, what it takes, and what found it."""

    further_ns: int
    peak_bytes: int
    method: str
    order: Order

    @property
    def rank(self) -> tuple[int, int]:
        """The less the better."""
        return self.further_ns, self.peak_bytes


@dataclass
class Search:
    """A problem, its budgets, and what is known of them.

    Attributes:
        problem: what is asked.
        budgets: pairs of budgets.
        deadline: on `time.monotonic`.
        limits: of one search by CP-SAT.
        say: hears what begins, and of each faster order.
        known: the fastest order of each budget that has one.
        bounds: of each budget: further time that no order of the class is below, ns; None where
            no order of the class is within the budget.
    """

    problem: GraphProblem
    budgets: tuple[Budget, ...]
    deadline: float
    limits: SearchLimits
    say: Callable[[str], None] = lambda _: None
    known: dict[Budget, _KnownOrder] = field(default_factory=dict)
    bounds: dict[Budget, int | None] = field(default_factory=dict)

    @cached_property
    def ledger(self) -> Ledger:
        """The graph's figures."""
        return Ledger(self.problem.graph)

    @cached_property
    def slots(self) -> Slots:
        """Where operations may run."""
        runs = runs_of(self.ledger, self.problem.runs)
        return Slots(self.ledger, runs, behind=not self.problem.anywhere)

    @cached_property
    def chain(self) -> BlockChain:
        """The graph as blocks."""
        return BlockChain(self.ledger, runs=self.problem.runs)

    @cached_property
    def hierarchies(self) -> list[Hierarchy]:
        """The graph as clusters of clusters; one where all have the same highest level."""
        found = [Hierarchy(self.ledger, Sizes(top=top), runs=self.problem.runs) for top in TOPS]
        return found if self.problem.graph.forwards > TOPS[0] else found[:1]

    def add(self, method: str, order: Order | None) -> None:
        """Know an order that a method found, if it did: for each budget the fastest one counts.

        Of equally fast ones that of least peak counts.
        """
        if order is None:
            return
        peak, saved = peak_bytes(self.ledger, order), saved_bytes(self.ledger, order)
        found = _KnownOrder(further(self.ledger, order), peak, method, order)
        for budget in self.budgets:
            within = budget.saved_bytes is None or saved <= budget.saved_bytes
            if not within or peak > budget.peak_bytes:
                continue
            before = self.known.get(budget)
            if before is None or found.rank < before.rank:
                self.known[budget] = found
            if before is None or found.further_ns < before.further_ns:
                self._tell(budget, found)

    def _tell(self, budget: Budget, found: _KnownOrder) -> None:
        within = f", {budget.peak_bytes} bytes" if len(self.budgets) > 1 else ""
        share = found.further_ns / max(1, self.problem.graph.compute_ns)
        self.say(f"{found.method}{within}: {share:.2%} over every operation once")

    def best(self, budget: Budget) -> tuple[str, Order] | None:
        """The fastest known order within a budget, and what found it."""
        found = self.known.get(budget)
        return None if found is None else (found.method, found.order)

    def left(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self.deadline - time.monotonic())
