"""H-ILP (X. Zhao's thesis, section 3.4): computations with options, phantoms of their sizes.

Stages and steps count from 0. A method per family of constraints, named by its equation. Where
the text as printed cannot be meant, the corrected form is built, and its docstring says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pipeplan.remat.graph.hierarchy.h_graph import HGraph
from pipeplan.remat.graph.hierarchy.h_variables import HVariables
from pipeplan.remat.graph.hierarchy.level import ClusterLevel
from pipeplan.remat.graph.milp.linear import (
    Constraints,
    Solved,
    add,
    at_most,
    equal,
    run,
)

FAMILIES = (
    "lower_triangle",
    "no_phantom_before_its_forward",
    "not_saved_before_made",
    "not_there_before_made",
    "final_values_are_there",
    "each_stage_ends",
    "loss_once",
    "allocated_where_saved",
    "contributions_come_from_runs",
    "inputs_are_there",
    "inputs_of_options_are_there",
    "one_option",
    "one_phantom",
    "phantoms_come_from_forwards",
    "phantoms_go_with_backwards",
    "backwards_need_phantoms",
    "alive_or_not",
    "alive_or_deleted",
    "created_by_runs",
    "kept_between_stages",
    "deleted_when_useless",
    "kept_when_useful",
    "within_budget",
)
"""(3.4) to (3.19), (3.21) to (3.26), and (3.33) with (3.34)."""


class HIlp(HVariables):
    """The integer program of one level and one budget.

    As printed, every forward leaves a phantom (3.18) that its backward alone takes away, so that
    no forward runs twice before its backward: what a level drops, options alone compute again.
    With `fast`, a forward may also run without an option, as R' of RK-Checkmate has it (2.9).

    Attributes:
        budget: B, bytes.
    """

    def __init__(
        self,
        level: ClusterLevel,
        budget: int,
        fast: bool = False,
        runs: int | None = None,
        leave_out: str | None = None,
    ) -> None:
        """Builds the program.

        Args:
            level: without received storages.
            budget: bytes that come and go.
            fast: whether forwards may run without an option.
            runs: how often a forward may run, again behind the loss alone, a backward once; None:
                without limit.
            leave_out: a family of constraints to do without.

        Raises:
            InputError: if the level receives storages.
        """
        super().__init__(HGraph(level), fast)
        self.budget = budget
        if runs is not None:
            self._limit(runs)
        for name in FAMILIES:
            if name != leave_out:
                family: Callable[[], Constraints] = getattr(self, name)
                for row in family():
                    add(self.model, row)
        self.model.minimize(self._objective())

    def _limit(self, runs: int) -> None:
        """The class of the interval form, which the thesis does not have."""
        stages = range(self.graph.count)
        for k in stages:
            again = runs if k < self.graph.loss else 1
            self.model.add(sum(self.ran(t, k) for t in stages) <= again)
            for t in range(k + 1, min(self.graph.loss, self.graph.count) + 1):
                if k < self.graph.loss:
                    self.model.add(self.ran(t, k) == 0)

    def _objective(self) -> Any:
        """Time of all runs beyond that of every computation once by its fastest option."""
        graph, found = self.graph, 0
        for k in range(graph.count):
            for t in range(graph.count):
                found += sum(graph.time(k, o) * self.Comp[t][k][o] for o in graph.options(k))
                found += graph.time(k, 0) * self.Fast[t][k]
            found -= graph.time(k, 0)
        return found

    def _each(self) -> Iterator[tuple[int, int]]:
        """Stages and edges from a computation to an allocation, the latter by its index."""
        for t in range(self.graph.count):
            for index in range(len(self.graph.edges)):
                yield t, index

    def lower_triangle(self) -> Constraints:
        """(3.4)"""
        for t in range(self.graph.count):
            for k in range(t + 1, self.graph.count):
                yield equal(self.ran(t, k), 0)

    def no_phantom_before_its_forward(self) -> Constraints:
        """(3.5)"""
        for t in range(self.graph.count):
            for j in range(t + 1, self.graph.parts):
                yield equal(sum(self.Sp[t][j]), 0)

    def not_saved_before_made(self) -> Constraints:
        """(3.6)"""
        for t in range(self.graph.count):
            for k, d in self.graph.edges:
                if t <= k:
                    yield equal(self.S[t][k, d], 0)

    def not_there_before_made(self) -> Constraints:
        """(3.7)"""
        for t in range(self.graph.count):
            for d, parents in enumerate(self.graph.parents):
                if t <= min(parents):
                    yield equal(self.P[t][d], 0)

    def final_values_are_there(self) -> Constraints:
        """(3.8)"""
        last = self.graph.count - 1
        for k, d in self.graph.edges:
            if d in self.graph.final:
                yield equal(self.S[last][k, d] + self.ran(last, k), 1)

    def each_stage_ends(self) -> Constraints:
        """(3.9)"""
        for t in range(self.graph.count):
            yield equal(self.ran(t, t), 1)

    def loss_once(self) -> Constraints:
        """(3.10)"""
        yield equal(sum(self.ran(t, self.graph.loss) for t in range(self.graph.count)), 1)

    def allocated_where_saved(self) -> Constraints:
        """(3.11)"""
        for t, index in self._each():
            k, d = self.graph.edges[index]
            yield at_most(self.S[t][k, d], self.P[t][d])

    def contributions_come_from_runs(self) -> Constraints:
        """(3.12)"""
        for t in range(self.graph.count - 1):
            for k, d in self.graph.edges:
                yield at_most(self.S[t + 1][k, d], self.S[t][k, d] + self.ran(t, k))

    def inputs_are_there(self) -> Constraints:
        """(3.13)"""
        for t in range(self.graph.count):
            for k, d in self.graph.edges:
                for child in self.graph.children[d]:
                    yield at_most(self.ran(t, child), self.ran(t, k) + self.S[t][k, d])

    def inputs_of_options_are_there(self) -> Constraints:
        """(3.14)"""
        for t in range(self.graph.count):
            for k, d in self.graph.edges:
                for child, o in self.graph.optional[d]:
                    yield at_most(self.Comp[t][child][o], self.ran(t, k) + self.S[t][k, d])

    def one_option(self) -> Constraints:
        """(3.15)"""
        for t in range(self.graph.count):
            for k in range(self.graph.count):
                yield at_most(self.ran(t, k), 1)

    def one_phantom(self) -> Constraints:
        """(3.16)"""
        for t in range(self.graph.count):
            for j in range(self.graph.parts):
                yield at_most(sum(self.Sp[t][j]), 1)

    def _phantoms(self) -> Iterator[tuple[int, int, int]]:
        for t in range(self.graph.count):
            for j in range(self.graph.parts):
                for o in self.graph.options(j):
                    yield t, j, o

    def phantoms_come_from_forwards(self) -> Constraints:
        """(3.17)"""
        for t, j, o in self._phantoms():
            yield at_most(self.next_phantom(t, j, o), self.Sp[t][j][o] + self.Comp[t][j][o])

    def phantoms_go_with_backwards(self) -> Constraints:
        """(3.18)"""
        for t, j, o in self._phantoms():
            there = self.Sp[t][j][o] + self.Comp[t][j][o]
            yield at_most(
                there - self.Comp[t][self.graph.backward(j)][o], self.next_phantom(t, j, o)
            )

    def backwards_need_phantoms(self) -> Constraints:
        """(3.19)"""
        for t, j, o in self._phantoms():
            there = self.Sp[t][j][o] + self.Comp[t][j][o]
            yield at_most(self.Comp[t][self.graph.backward(j)][o], there)

    def _related(self) -> Iterator[tuple[int, int, int]]:
        for t in range(self.graph.count):
            for d, near in enumerate(self.graph.near):
                for k in near:
                    yield t, k, d

    def alive_or_not(self) -> Constraints:
        """(3.21)"""
        for t, k, d in self._related():
            yield at_most(0, self.alive(t, k, d))
            yield at_most(self.alive(t, k, d), 1)

    def alive_or_deleted(self) -> Constraints:
        """(3.22)"""
        for t, index in self._each():
            k, d = self.graph.edges[index]
            yield at_most(self.ran(t, k), self.alive(t, k, d) + self.D[t][k, d])

    def created_by_runs(self) -> Constraints:
        """(3.23)"""
        for t, index in self._each():
            yield at_most(
                self.C[t][self.graph.edges[index]], self.ran(t, self.graph.edges[index][0])
            )

    def kept_between_stages(self) -> Constraints:
        """(3.24)"""
        for t in range(self.graph.count):
            for d, near in enumerate(self.graph.near):
                yield equal(self.alive(t, near[-1], d), self.later(t, d))

    def _useful(self, t: int, k: int, d: int) -> tuple[Any, int]:
        """Readers behind k in stage t and in the next stage, and how many there may be."""
        readers = [self.ran(t, each) for each in self.graph.children[d] if each > k]
        readers += [self.Comp[t][each][o] for each, o in self.graph.optional[d] if each > k]
        return self.later(t, d) + sum(readers), 2 + len(readers)

    def deleted_when_useless(self) -> Constraints:
        """(3.25); P_k of the text is P_d."""
        for t, k, d in self._related():
            useful, _ = self._useful(t, k, d)
            yield at_most(self.ran(t, k) - useful, self.D[t][k, d])

    def kept_when_useful(self) -> Constraints:
        """(3.26)"""
        for t, k, d in self._related():
            useful, most = self._useful(t, k, d)
            yield at_most(1 - self.ran(t, k) + useful, most - most * self.D[t][k, d])

    def within_budget(self) -> Constraints:
        """(3.33)"""
        graph = self.graph
        for t in range(graph.count):
            for k in range(t + 1):
                over = graph.fast_overhead(k) * self.Fast[t][k] if k < graph.loss else 0
                over += sum(graph.overhead(k, o) * self.Comp[t][k][o] for o in graph.options(k))
                yield at_most(self.used[t][k] + over + self.deleted(t, k), self.budget)

    def solve(self, solver: str = "highs", seconds: float = 60.0) -> Solved:
        """The best schedule that is found; `objective` is time beyond the least."""
        found, feasible, proven = run(self.model, solver, seconds)
        if not feasible:
            return Solved(None, found.best_objective_bound, proven)
        steps = tuple(
            k
            for t in range(self.graph.count)
            for k in range(t + 1)
            if found.value(self.ran(t, k)) > 0.5
        )
        return Solved(round(found.objective_value), found.best_objective_bound, proven, steps)
