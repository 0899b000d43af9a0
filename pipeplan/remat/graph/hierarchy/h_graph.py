"""A level in the words of H-ILP: computations, allocations, phantoms (X. Zhao's thesis, 3.4.1)."""

from __future__ import annotations

from functools import cached_property

from pipeplan.errors import InputError
from pipeplan.remat.graph.hierarchy.level import ClusterLevel
from pipeplan.remat.graph.hierarchy.ways import ClusterWay
from pipeplan.remat.graph.ledger import END_F, Ledger


class HGraph:
    """n clusters have 2 n + 1 computations: forwards, the loss, and backwards in reverse.

    Attributes:
        level: where it comes from.
        parts: n.
        loss: the computation between both passes.
        count: T, the number of computations.
        sizes: s of each allocation, bytes.
        parents: per allocation the computations that contribute to it.
        children: per allocation the computations that need it in all their options.
        optional: per allocation the pairs of computation and option that need it beside them.
        final: allocations that are there at the end.
    """

    def __init__(self, level: ClusterLevel) -> None:
        """The graph of a level.

        Raises:
            InputError: if the level receives storages, which the thesis does not know.
        """
        ledger = Ledger(level.graph)
        if ledger.received:
            raise InputError("h-ilp: got a graph that receives storages, need inputs")
        self.level, self.parts = level, len(level.parts)
        self.loss, self.count = self.parts, 2 * self.parts + 1
        step = {at: at + (at >= self.parts) for at in range(2 * self.parts)} | {END_F: self.loss}
        entries = ledger.first_order()
        values = range(len(ledger.size) - self.parts)
        self.sizes = ledger.size[: len(values)]
        self.parents = [[step[at] for at in entries if d in ledger.made(at)] for d in values]
        self.children = [[step[at] for at in entries if d in ledger.needed(at)] for d in values]
        maybe = level.maybe.items()
        self.optional = [
            [(step[at], way) for at, read in maybe for way in read.get(d, ())] for d in values
        ]
        self.final = frozenset(ledger.handed_back)

    @cached_property
    def edges(self) -> list[tuple[int, int]]:
        """Pairs k -> d of a computation and an allocation that it contributes to."""
        return [(k, d) for d, parents in enumerate(self.parents) for k in parents]

    @cached_property
    def near(self) -> list[list[int]]:
        """Per allocation the computations k <-> d in order."""
        return [
            sorted({*parents, *children, *(k for k, _ in optional)})
            for parents, children, optional in zip(
                self.parents, self.children, self.optional, strict=True
            )
        ]

    def part(self, k: int) -> int:
        """The cluster whose forward or backward a computation is."""
        return k if k < self.loss else self.count - 1 - k

    def backward(self, j: int) -> int:
        """The computation B_j."""
        return self.count - 1 - j

    def options(self, k: int) -> range:
        """The options of a computation; the loss has one."""
        return range(1 if k == self.loss else len(self.level.parts[self.part(k)].ways))

    def way(self, k: int, o: int) -> ClusterWay:
        """An option of a computation's cluster."""
        return self.level.parts[self.part(k)].ways[o]

    def time(self, k: int, o: int) -> int:
        """Of a computation by an option, ns."""
        if k == self.loss:
            return 0
        way = self.way(k, o)
        return way.forward_ns if k < self.loss else way.backward_ns

    def phantom(self, j: int, o: int) -> int:
        """p: bytes of a cluster's phantom."""
        return self.way(j, o).saved

    def overhead(self, k: int, o: int) -> int:
        """m: bytes while an option runs, beyond what it leaves.

        A backward's peak includes its phantom, which U has lost by then.
        """
        if k == self.loss:
            return 0
        way = self.way(k, o)
        peak = way.forward_peak - way.saved if k < self.loss else way.backward_peak
        return peak - self._made(k)

    def fast_overhead(self, k: int) -> int:
        """The same of a forward of which nothing is kept."""
        return self.level.parts[k].forward_peak - self._made(k)

    def _made(self, k: int) -> int:
        return sum(self.sizes[d] for e, d in self.edges if e == k)
