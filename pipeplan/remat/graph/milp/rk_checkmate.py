"""RK-Checkmate (X. Zhao's thesis, section 2.4): computations, allocations and phantoms apart.

Stages and steps count from 0. A method per family of constraints, named by its equation. Where
the text as printed cannot be meant, the corrected form is built, and its docstring says so.
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
    "lower_triangle",
    "not_saved_before_made",
    "each_stage_ends",
    "loss_once",
    "results_come_from_runs",
    "inputs_are_there",
    "phantoms_come_from_forwards",
    "backwards_need_phantoms",
    "allocated_where_saved",
    "saved_where_allocated",
    "alive_or_deleted",
    "kept_between_stages",
    "created_by_parents",
    "deleted_when_useless",
    "nothing_left",
    "within_peak",
    "within_saved",
)
"""(2.3) to (2.19), in this order."""


class RkCheckmate:
    """The integer program of one graph and one pair of budgets.

    Attributes:
        graph: what is scheduled.
        peak: M_peak, bytes.
        saved: M_save, bytes, or None without limit.
    """

    def __init__(
        self, graph: FbGraph, peak: int, saved: int | None = None, leave_out: str | None = None
    ) -> None:
        """Builds the program; `leave_out` names a family of constraints to do without."""
        self.graph, self.peak, self.saved = graph, peak, saved
        self.model = new_model()
        stages = range(graph.count)
        self.R = [[self._bool(f"R {t} {k}") for k in stages] for t in stages]
        pairs = {each.forward for each in graph.phantoms}
        self.fast = [
            [self._bool(f"R' {t} {k}") if k in pairs else 0 for k in stages] for t in stages
        ]
        self.S = [{e: self._bool(f"S {t} {e}") for e in graph.edges} for t in stages]
        self.Sp = [
            [self._bool(f"Sp {t} {j}") for j, _ in enumerate(graph.phantoms)] for t in stages
        ]
        self.P = [[self._bool(f"P {t} {i}") for i, _ in enumerate(graph.sizes)] for t in stages]
        self.create: dict[tuple[int, int, int], Any] = {}
        self.delete: dict[tuple[int, int, int], Any] = {}
        self._allocation_variables()
        self._fixed()
        for name in FAMILIES:
            if name != leave_out:
                family: Callable[[], Constraints] = getattr(self, name)
                for row in family():
                    add(self.model, row)
        self.model.minimize(self._objective())

    def _bool(self, name: str) -> Any:
        return self.model.new_bool_var(name)

    def _allocation_variables(self) -> None:
        for t in range(self.graph.count):
            for i in range(len(self.graph.sizes)):
                for k in self.graph.parents[i]:
                    self.create[t, i, k] = self._bool(f"create {t} {i} {k}")
                for k in self.graph.near(i):
                    self.delete[t, i, k] = self._bool(f"delete {t} {i} {k}")

    def _fixed(self) -> None:
        """What the text says beside the equations: P, S and S^p start empty, R + R' <= 1.

        Computations that may not run again, which the thesis does not have, run in their stage.
        """
        for t in range(self.graph.count):
            for k in range(self.graph.count):
                if self.graph.again is not None and k not in self.graph.again and t > k:
                    self.model.add(self.runs(t, k) == 0)
                if not isinstance(self.fast[t][k], int):
                    self.model.add(self.runs(t, k) <= 1)
            for i, parents in enumerate(self.graph.parents):
                if t <= parents[0]:
                    self.model.add(self.P[t][i] == 0)
        for each in self.Sp[0]:
            self.model.add(each == 0)

    def runs(self, t: int, k: int) -> Any:
        """R + R': whether a computation runs in a stage."""
        return self.R[t][k] + self.fast[t][k]

    def _objective(self) -> Any:
        """Time of all further runs; those of R' count as well, which the text leaves out."""
        stages = range(self.graph.count)
        return sum(self.graph.time[k] * self.runs(t, k) for t in stages for k in range(t))

    def lower_triangle(self) -> Constraints:
        """(2.3): a stage runs nothing that has not ended a stage before it."""
        count = self.graph.count
        above = [self.runs(t, k) for t in range(count) for k in range(t + 1, count)]
        if above:
            yield equal(sum(above), 0)

    def not_saved_before_made(self) -> Constraints:
        """(2.4): before its first run nothing of a computation is saved."""
        for k, i in self.graph.edges:
            yield equal(sum(self.S[t][k, i] for t in range(k + 1)), 0)

    def each_stage_ends(self) -> Constraints:
        """(2.5): stage t ends with the first run of computation t."""
        stages = range(self.graph.count)
        yield equal(sum(self.runs(t, t) for t in stages), self.graph.count)

    def loss_once(self) -> Constraints:
        """(2.6): the loss is computed once."""
        yield equal(sum(self.R[t][self.graph.loss] for t in range(self.graph.count)), 1)

    def results_come_from_runs(self) -> Constraints:
        """(2.7): what is saved was saved before or computed in the stage before."""
        for t in range(self.graph.count - 1):
            for k, i in self.graph.edges:
                yield at_most(self.S[t + 1][k, i], self.S[t][k, i] + self.runs(t, k))

    def inputs_are_there(self) -> Constraints:
        """(2.8): a computation runs where all contributions to its inputs are there."""
        for t in range(self.graph.count):
            for k, i in self.graph.edges:
                for child in self.graph.children[i]:
                    yield at_most(self.runs(t, child), self.runs(t, k) + self.S[t][k, i])

    def phantoms_come_from_forwards(self) -> Constraints:
        """(2.9): a phantom is there if it was before, or its forward ran in the stage before.

        Printed is S^p(t, j) <= R(t, fwd(j)), by which no phantom outlives a stage; meant is the
        form of (2.7).
        """
        for t in range(self.graph.count - 1):
            for j, phantom in enumerate(self.graph.phantoms):
                made = self.R[t][phantom.forward]
                yield at_most(self.Sp[t + 1][j], self.Sp[t][j] + made)

    def backwards_need_phantoms(self) -> Constraints:
        """(2.10): a backward runs where its phantom is."""
        for t in range(self.graph.count):
            for j, phantom in enumerate(self.graph.phantoms):
                there = self.R[t][phantom.forward] + self.Sp[t][j]
                yield at_most(self.R[t][phantom.backward], there)

    def allocated_where_saved(self) -> Constraints:
        """(2.11): an allocation takes memory where a contribution is saved."""
        for t in range(self.graph.count):
            for k, i in self.graph.edges:
                share = 1.0 / len(self.graph.parents[i])
                yield at_most(share * self.S[t][k, i], self.P[t][i])

    def saved_where_allocated(self) -> Constraints:
        """(2.12): contributions are saved in memory only."""
        for t in range(self.graph.count):
            for k, i in self.graph.edges:
                yield at_most(self.S[t][k, i], self.P[t][i])

    def alive(self, t: int, i: int, k: int) -> Any:
        """Whether an allocation is there behind step k of stage t."""
        created = sum(self.create[t, i, each] for each in self.graph.parents[i] if each <= k)
        deleted = sum(self.delete[t, i, each] for each in self.graph.near(i) if each <= k)
        return self.P[t][i] + created - deleted

    def alive_or_deleted(self) -> Constraints:
        """(2.13), and that `alive` is 0 or 1: behind a parent its result is there or deleted."""
        for t in range(self.graph.count):
            for i, parents in enumerate(self.graph.parents):
                for k in self.graph.near(i):
                    alive = self.alive(t, i, k)
                    yield at_most(0, alive)
                    yield at_most(alive, 1)
                    if k in parents:
                        yield at_most(self.runs(t, k), alive + self.delete[t, i, k])

    def kept_between_stages(self) -> Constraints:
        """(2.14): what is alive at the end of a stage is there in the next one.

        Printed without the step from t to t + 1.
        """
        for t in range(self.graph.count - 1):
            for i in range(len(self.graph.sizes)):
                yield equal(self.alive(t, i, self.graph.last(i)), self.P[t + 1][i])

    def created_by_parents(self) -> Constraints:
        """(2.15): only a parent that runs creates an allocation."""
        for (t, _, k), create in self.create.items():
            yield at_most(create, self.runs(t, k))

    def deleted_when_useless(self) -> Constraints:
        """(2.16): deleted behind a run that is followed by no child, and not kept, in its stage.

        The linear form counts what speaks against it, as Checkmate's does; printed, its last term
        is a product of complements.
        """
        for (t, i, k), delete in self.delete.items():
            later = [each for each in self.graph.children[i] if each > k]
            against = 1 - self.runs(t, k) + sum(self.runs(t, each) for each in later)
            if t + 1 < self.graph.count:
                against += self.P[t + 1][i]
            most = 2 + len(later)
            yield at_most(1 - delete, against)
            yield at_most(against, most * (1 - delete))

    def nothing_left(self) -> Constraints:
        """(2.17): behind the last stage nothing is alive."""
        last = self.graph.count - 1
        for i in range(len(self.graph.sizes)):
            yield equal(self.alive(last, i, self.graph.last(i)), 0)

    @cached_property
    def used(self) -> list[list[Any]]:
        """U: bytes held behind each step of each stage.

        Phantoms that are saved count from the begin of their stage; printed, from their forward.
        """
        found = []
        for t in range(self.graph.count):
            held = sum(size * self.P[t][i] for i, size in enumerate(self.graph.sizes))
            held += sum(each.bytes * self.Sp[t][j] for j, each in enumerate(self.graph.phantoms))
            row = []
            for k in range(self.graph.count):
                held = held + self._change(t, k)
                row.append(held)
            found.append(row)
        return found

    def _change(self, t: int, k: int) -> Any:
        change: Any = 0
        for i, size in enumerate(self.graph.sizes):
            if (t, i, k) in self.create:
                change += size * self.create[t, i, k]
            if (t, i, k) in self.delete:
                change -= size * self.delete[t, i, k]
        for phantom in self.graph.phantoms:
            if k == phantom.forward:
                change += phantom.bytes * self.R[t][k]
            if k == phantom.backward:
                change -= phantom.bytes * self.R[t][k]
        return change

    def within_peak(self) -> Constraints:
        """(2.18): during each step, before its deletions, memory is within M_peak.

        The phantom of a backward is there while it runs; printed, U has lost it by then.
        """
        for t in range(self.graph.count):
            for k in range(t + 1):
                deleted = sum(
                    size * self.delete[t, i, k]
                    for i, size in enumerate(self.graph.sizes)
                    if (t, i, k) in self.delete
                )
                phantoms = sum(p.bytes for p in self.graph.phantoms if p.backward == k)
                own = (self.graph.workspace[k] + phantoms) * self.R[t][k]
                fast = self.graph.workspace[k] * self.fast[t][k]
                yield at_most(own + fast + self.used[t][k] + deleted, self.peak)

    def within_saved(self) -> Constraints:
        """(2.19): behind the loss at most M_save is held."""
        if self.saved is None:
            return
        loss = self.graph.loss
        held = 0
        for j, each in enumerate(self.graph.phantoms):
            held += each.bytes * (self.Sp[loss][j] + self.R[loss][each.forward])
        for i, size in enumerate(self.graph.sizes):
            if i not in self.graph.uncounted and self.graph.parents[i][0] <= loss:
                held += size * self.alive(loss, i, loss)
        yield at_most(held, self.saved)

    def solve(self, solver: str = "highs", seconds: float = 60.0) -> Solved:
        """The best schedule found (Algorithm 4 reads it off)."""
        found, feasible, proven = run(self.model, solver, seconds)
        if not feasible:
            return Solved(None, float("inf") if proven else 0.0, proven)
        stages = range(self.graph.count)
        order = tuple(
            k for t in stages for k in range(t + 1) if found.value(self.runs(t, k)) > 0.5
        )
        return Solved(round(found.objective_value), found.best_objective_bound, proven, order)
