"""RK-GB's graph of computations and allocations, which the integer programs are written for.

X. Zhao's thesis, sections 1.3.1 and 2.4.1: cNodes compute, aNodes are allocations, a phantom is
what a forward leaves for its own backward alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from pipeplan.remat.graph.ledger import END_F, Ledger, Order

HAND_BACK = -3
"""A last computation that takes the gradients of inputs."""


@dataclass(frozen=True)
class Phantom:
    """What the forward of a pair keeps inside autograd for its backward."""

    bytes: int
    forward: int
    backward: int


@dataclass(frozen=True)
class FbGraph:
    """A forward-backward graph; indices from 0 in a topological order.

    Attributes:
        time: of each computation, ns.
        workspace: tmpM of each computation, bytes.
        sizes: M of each allocation, bytes.
        parents: per allocation the computations that contribute to it.
        children: per allocation the computations that need it.
        loss: the computation between both passes.
        phantoms: what pairs of forward and backward share.
        uncounted: allocations that do not count as saved; the thesis has none.
        names: what each computation stands for, in the order that is read off a solution.
        again: computations that may run more than once; None: all.
    """

    time: tuple[int, ...]
    workspace: tuple[int, ...]
    sizes: tuple[int, ...]
    parents: tuple[tuple[int, ...], ...]
    children: tuple[tuple[int, ...], ...]
    loss: int
    phantoms: tuple[Phantom, ...] = ()
    uncounted: frozenset[int] = frozenset()
    names: tuple[int, ...] = ()
    again: frozenset[int] | None = None

    @property
    def count(self) -> int:
        """T, the number of computations."""
        return len(self.time)

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs of a computation and an allocation that it contributes to."""
        return tuple((k, i) for i, parents in enumerate(self.parents) for k in parents)

    def near(self, allocation: int) -> tuple[int, ...]:
        """Parents and children of an allocation, in order."""
        return tuple(sorted({*self.parents[allocation], *self.children[allocation]}))

    def last(self, allocation: int) -> int:
        """The last of them."""
        return self.near(allocation)[-1]

    def order(self, runs: Iterable[int]) -> Order:
        """What computations stand for, the last one for handing back left out."""
        return tuple(self.names[each] for each in runs if self.names[each] != HAND_BACK)


def of_operators(ledger: Ledger, again: Iterable[int] | None = None) -> FbGraph:
    """An operator graph in these words: every storage is an allocation, none is a phantom.

    Storages that stay are left out; what is received comes with a first computation, tangents
    with that of the loss, and a last one takes the gradients of inputs.

    Args:
        ledger: the graph.
        again: operations that may run again; None: all but those that run `once`.
    """
    names = (*ledger.first_order(), *((HAND_BACK,) if ledger.handed_back else ()))
    place = {at: index for index, at in enumerate(names)}
    storages = [s for at in names if at != HAND_BACK for s in ledger.made(at)]
    readers = {at: ledger.handed_back if at == HAND_BACK else ledger.needed(at) for at in names}
    operations = ledger.graph.operations
    allowed = set(range(len(operations)) if again is None else again)
    return FbGraph(
        time=tuple(ledger.time[at] if at >= 0 else 0 for at in names),
        workspace=tuple(operations[at].workspace_bytes if at >= 0 else 0 for at in names),
        sizes=tuple(ledger.size[s] for s in storages),
        parents=tuple((place[at],) for at in names if at != HAND_BACK for _ in ledger.made(at)),
        children=tuple(
            tuple(place[at] for at in names if storage in readers[at]) for storage in storages
        ),
        loss=place[END_F],
        uncounted=frozenset(
            index
            for index, storage in enumerate(storages)
            if storage in ledger.unsaved or storage in ledger.tangents
        ),
        names=names,
        again=frozenset(place[at] for at in allowed if not operations[at].once),
    )
