"""Checkmate (P. Jain et al., MLSys 2020) as X. Zhao's thesis has it, section 2.1.1.

A node is a computation with all its outputs, which come and go together; what it takes beyond
them is not counted. Stages and steps count from 0. A method per family of constraints.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from pipeplan.remat.graph.milp.fb_graph import FbGraph
from pipeplan.remat.graph.milp.linear import (
    Constraints,
    Solved,
    add,
    at_most,
    equal,
    new_model,
    run,
)

FAMILIES = (
    "inputs_are_there",
    "saved_come_from_runs",
    "nothing_saved_first",
    "frontier_advances",
    "freed_when_useless",
    "within_budget",
)


class Checkmate:
    """The integer program of one graph and one budget.

    Attributes:
        graph: whose allocations are joined by the computation that makes them.
        budget: M_budget, bytes.
    """

    def __init__(self, graph: FbGraph, budget: int, leave_out: str | None = None) -> None:
        """Builds the program; `leave_out` names a family of constraints to do without."""
        self.graph, self.budget = graph, budget
        self.model = new_model()
        stages = range(graph.count)
        self.R = [[self._bool(f"R {t} {i}") for i in range(t + 1)] for t in range(graph.count)]
        self.S = [[self._bool(f"S {t} {i}") for i in stages] for t in stages]
        self.free = {
            (t, i, k): self._bool(f"FREE {t} {i} {k}")
            for t in range(graph.count)
            for k in range(t + 1)
            for i in (*self.dependencies[k], k)
        }
        for name in FAMILIES:
            if name != leave_out:
                family: Callable[[], Constraints] = getattr(self, name)
                for row in family():
                    add(self.model, row)
        self.model.minimize(sum(graph.time[i] * self.R[t][i] for t in stages for i in range(t)))

    def _bool(self, name: str) -> Any:
        return self.model.new_bool_var(name)

    @cached_property
    def sizes(self) -> list[int]:
        """M: bytes of each node's outputs."""
        found = [0] * self.graph.count
        for size, parents in zip(self.graph.sizes, self.graph.parents, strict=True):
            found[parents[0]] += size
        return found

    @cached_property
    def users(self) -> list[list[int]]:
        """USERS of each node."""
        found: list[set[int]] = [set() for _ in range(self.graph.count)]
        for parents, children in zip(self.graph.parents, self.graph.children, strict=True):
            found[parents[0]].update(children)
        return [sorted(each) for each in found]

    @cached_property
    def dependencies(self) -> list[list[int]]:
        """DEPS of each node."""
        count = range(self.graph.count)
        return [[i for i in count if k in self.users[i]] for k in count]

    def _saved(self, t: int, i: int) -> Any:
        return self.S[t][i] if t < self.graph.count else 0

    def inputs_are_there(self) -> Constraints:
        """R(t, j) <= R(t, i) + S(t, i) for i -> j."""
        for t in range(self.graph.count):
            for j in range(t + 1):
                for i in self.dependencies[j]:
                    yield at_most(self.R[t][j], self.R[t][i] + self._saved(t, i))

    def saved_come_from_runs(self) -> Constraints:
        """S(t, i) <= R(t - 1, i) + S(t - 1, i)."""
        for t in range(1, self.graph.count):
            for i in range(self.graph.count):
                made = self.R[t - 1][i] if i < t else 0
                yield at_most(self.S[t][i], made + self.S[t - 1][i])

    def nothing_saved_first(self) -> Constraints:
        """The sum of S(1, i) is 0: nothing is there before the first stage."""
        yield equal(sum(self.S[0]), 0)

    def frontier_advances(self) -> Constraints:
        """R(t, t) = 1, (8a) of Jain et al.; the thesis asks for the last node alone.

        With it the first runs are in the graph's order. Nodes that may run once do.
        """
        for t in range(self.graph.count):
            yield equal(self.R[t][t], 1)
            for i in range(t):
                if self.graph.again is not None and i not in self.graph.again:
                    yield equal(self.R[t][i], 0)

    def freed_when_useless(self) -> Constraints:
        """FREE(t, i, k) = R(t, k) (1 - S(t + 1, i)) prod (1 - R(t, j)), by its hazards."""
        for (t, i, k), free in self.free.items():
            later = [j for j in self.users[i] if k < j <= t]
            hazards = 1 - self.R[t][k] + self._saved(t + 1, i)
            hazards += sum(self.R[t][j] for j in later)
            yield at_most(1 - free, hazards)
            yield at_most(hazards, (2 + len(later)) * (1 - free))

    def within_budget(self) -> Constraints:
        """U(t, k + 1) = U(t, k) - mem_freed(t, k) + R(t, k + 1) M(k + 1), at most M_budget."""
        for t in range(self.graph.count):
            used = sum(size * self.S[t][i] for i, size in enumerate(self.sizes))
            for k in range(t + 1):
                used = used + self.sizes[k] * self.R[t][k]
                yield at_most(used, self.budget)
                used = used - sum(
                    self.sizes[i] * self.free[t, i, k] for i in (*self.dependencies[k], k)
                )

    def solve(self, solver: str = "highs", seconds: float = 60.0) -> Solved:
        """The best schedule found."""
        found, feasible, proven = run(self.model, solver, seconds)
        if not feasible:
            return Solved(None, float("inf") if proven else 0.0, proven)
        order = tuple(
            k
            for t in range(self.graph.count)
            for k in range(t + 1)
            if found.value(self.R[t][k]) > 0.5
        )
        return Solved(round(found.objective_value), found.best_objective_bound, proven, order)
