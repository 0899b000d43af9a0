"""The least further time of a level within budgets, by CP-SAT."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from pipeplan.remat.graph.hierarchy.level import ClusterLevel
from pipeplan.remat.graph.hierarchy.way_model import WayModel
from pipeplan.remat.graph.intervals.search import SearchLimits, run_model
from pipeplan.remat.graph.intervals.slots import Slots, runs_of
from pipeplan.remat.graph.ledger import Ledger, Order

UNITS = 100_000
"""Units of memory into which a budget is divided at most."""


@dataclass(frozen=True)
class LevelPlan:
    """What a level does.

    Attributes:
        runs: order of the level's own operations.
        ways: of each part.
        further_ns: time beyond that of every part once by its fastest way.
        proven: whether no plan of the level's model takes less.
    """

    runs: Order
    ways: tuple[int, ...]
    further_ns: int
    proven: bool


@dataclass(frozen=True)
class LevelSolver:
    """A level with its slots: it is solved within many budgets.

    Attributes:
        level: the graph.
        runs: how often the forward of a part may run.
    """

    level: ClusterLevel
    runs: int = 2

    @cached_property
    def slots(self) -> Slots:
        """Where parts may run: again behind the end of the forward only."""
        ledger = Ledger(self.level.graph)
        return Slots(ledger, runs_of(ledger, min(2, self.runs)), behind=True)

    def solve(
        self,
        peak: int,
        saved: int | None,
        limits: SearchLimits,
        hint: LevelPlan | None = None,
    ) -> LevelPlan | None:
        """The fastest plan found; None where none is.

        Args:
            peak: bytes that come and go.
            saved: bytes at the end of the forward, outputs not counted.
            limits: of the search.
            hint: a plan to start from, whatever it takes.
        """
        from ortools.sat.python import cp_model

        if peak < 0:
            return None
        unit = max(1, -(-peak // UNITS))
        model = WayModel(cp_model.CpModel(), self.level, self.slots, unit, (peak, saved))
        model.build()
        if hint is not None:
            model.runs.hint(hint.runs)
            model.hint_ways(hint.ways, hint.runs)
        status, solver = run_model(model, limits, linearization=2)
        if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return None
        return LevelPlan(
            model.runs.order(solver.value),
            model.chosen(solver.value),
            round(solver.objective_value),
            status == cp_model.OPTIMAL,
        )
