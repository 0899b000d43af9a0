"""The variables of H-ILP, and what its constraints say with them."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from pipeplan.remat.graph.hierarchy.h_graph import HGraph
from pipeplan.remat.graph.milp.linear import new_model


class HVariables:
    """Variables of X. Zhao's thesis, 3.4.2.1, by stage first.

    Attributes:
        graph: what is scheduled.
        model: of OR-tools.
        Comp: whether a computation runs by an option.
        Fast: whether a forward runs without one.
        S: whether a contribution is there before a stage.
        P: whether an allocation is.
        Sp: whether a phantom of an option is.
        C: whether a computation creates an allocation.
        D: whether an allocation is deleted behind a computation.
    """

    def __init__(self, graph: HGraph, fast: bool) -> None:
        """All variables; with `fast`, forwards may run without an option."""
        self.graph, self.model = graph, new_model()
        stages, bool_var = range(graph.count), self.model.new_bool_var
        self.Comp = [
            [[bool_var(f"Comp {t} {k} {o}") for o in graph.options(k)] for k in stages]
            for t in stages
        ]
        self.Fast = [
            [bool_var(f"fast {t} {k}") if fast and k < graph.loss else 0 for k in stages]
            for t in stages
        ]
        self.S = [{e: bool_var(f"S {t} {e}") for e in graph.edges} for t in stages]
        self.P = [[bool_var(f"P {t} {d}") for d, _ in enumerate(graph.sizes)] for t in stages]
        self.Sp = [
            [[bool_var(f"Sp {t} {j} {o}") for o in graph.options(j)] for j in range(graph.parts)]
            for t in stages
        ]
        self.C = [{e: bool_var(f"C {t} {e}") for e in graph.edges} for t in stages]
        self.D = [
            {(k, d): bool_var(f"D {t} {k} {d}") for d, near in enumerate(graph.near) for k in near}
            for t in stages
        ]

    def ran(self, t: int, k: int) -> Any:
        """sumComp: whether a computation runs in a stage."""
        return sum(self.Comp[t][k]) + self.Fast[t][k]

    def next_phantom(self, t: int, j: int, o: int) -> Any:
        """Sp of the next stage; behind the last one nothing is kept."""
        return self.Sp[t + 1][j][o] if t + 1 < self.graph.count else 0

    def alive(self, t: int, k: int, d: int) -> Any:
        """(3.20): whether an allocation is there behind computation k of stage t."""
        created = sum(self.C[t][each, d] for each in self.graph.parents[d] if each <= k)
        deleted = sum(self.D[t][each, d] for each in self.graph.near[d] if each <= k)
        return self.P[t][d] + created - deleted

    def later(self, t: int, d: int) -> Any:
        """P of the next stage; behind the last one, what is final is there."""
        return self.P[t + 1][d] if t + 1 < self.graph.count else int(d in self.graph.final)

    @cached_property
    def used(self) -> list[list[Any]]:
        """U (3.27)-(3.32): bytes behind each computation of each stage."""
        found = []
        for t in range(self.graph.count):
            held = sum(size * self.P[t][d] for d, size in enumerate(self.graph.sizes))
            held += sum(
                self.graph.phantom(j, o) * self.Sp[t][j][o]
                for j in range(self.graph.parts)
                for o in self.graph.options(j)
            )
            row = []
            for k in range(self.graph.count):
                held = held + self._increment(t, k)
                row.append(held)
            found.append(row)
        return found

    def _increment(self, t: int, k: int) -> Any:
        """(3.28) of a forward, (3.29) of a backward."""
        found: Any = sum(
            self.graph.sizes[d] * self.C[t][e, d] for e, d in self.graph.edges if e == k
        )
        found -= self.deleted(t, k)
        if k == self.graph.loss:
            return found
        j = self.graph.part(k)
        for o in self.graph.options(j):
            size = self.graph.phantom(j, o)
            if k < self.graph.loss:
                found += size * self.Comp[t][j][o]
            else:
                there = self.Comp[t][j][o] + self.Sp[t][j][o]
                found -= size * (there - self.next_phantom(t, j, o))
        return found

    def deleted(self, t: int, k: int) -> Any:
        """Bytes that go behind computation k of stage t."""
        return sum(self.graph.sizes[d] * self.D[t][e, d] for e, d in self.D[t] if e == k)
