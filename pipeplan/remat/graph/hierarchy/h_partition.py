"""H-Partition: groups of groups of operations (X. Zhao's thesis, Algorithm 7)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from pipeplan.remat.graph.hierarchy.candidates import ALPHA, Score, windows
from pipeplan.remat.graph.hierarchy.data_flow import ForwardFlow

Candidates = Callable[[ForwardFlow, int], Iterable[frozenset[int]]]


@dataclass(frozen=True)
class Sizes:
    """What bounds a hierarchy.

    Attributes:
        top: M^t, nodes of the highest level.
        lower: M^l, nodes of a group.
        operations: of the forward in a group that is solved without groups inside.
        alpha: of the score (3.1).
    """

    top: int = 30
    lower: int = 20
    operations: int = 24
    alpha: float = ALPHA


@dataclass(frozen=True)
class Group:
    """Nodes that are one node of the level above: operations, and groups of them.

    Attributes:
        nodes: in an order in which they may run.
    """

    nodes: tuple[int | Group, ...]

    @property
    def operations(self) -> tuple[int, ...]:
        """All operations in it, in its order."""
        return tuple(_operations(self.nodes))


def _operations(nodes: Iterable[int | Group]) -> Iterator[int]:
    for node in nodes:
        if isinstance(node, Group):
            yield from _operations(node.nodes)
        else:
            yield node


def h_partition(
    flow: ForwardFlow, sizes: Sizes | None = None, candidates: Candidates = windows
) -> Group:
    """The highest level: phases until it is small enough.

    Args:
        flow: operations of the forward.
        sizes: of the levels.
        candidates: C of a graph and M^l; `dominated` are those of Algorithm 7. Where they group
            nothing, `windows` do.
    """
    sizes = sizes or Sizes()
    nodes: list[int | Group] = list(range(len(flow.sizes)))
    while len(nodes) > sizes.top:
        groups = phase(flow, sizes, candidates(flow, sizes.lower))
        groups = groups or phase(flow, sizes, windows(flow, sizes.lower))
        flow, members = flow.contracted(groups)
        nodes = [_node([nodes[each] for each in inside], sizes) for inside in members]
    return Group(tuple(nodes))


def _node(nodes: list[int | Group], sizes: Sizes) -> int | Group:
    """One node as it was; of several a group, without groups inside where it is small."""
    if len(nodes) == 1:
        return nodes[0]
    operations = tuple(_operations(nodes))
    return Group(operations if len(operations) <= sizes.operations else tuple(nodes))


def phase(
    flow: ForwardFlow, sizes: Sizes, candidates: Iterable[frozenset[int]]
) -> list[frozenset[int]]:
    """Lines 4 to 9: the best candidate becomes a group until the graph is small enough.

    Args:
        flow: the graph.
        sizes: M^t, M^l and alpha.
        candidates: C; unions of those that share a node must be convex.
    """
    pool = _Pool(set(candidates), Score(flow, sizes.alpha), sizes.lower)
    groups: dict[int, frozenset[int]] = {}
    count = len(flow.sizes)
    while count > sizes.top:
        best = pool.take()
        if best is None:
            break
        inside = {groups[node] for node in best if node in groups}
        count -= len(best) - 1 - sum(len(each) - 1 for each in inside)
        groups.update(dict.fromkeys(best, best))
        pool.join(best)
    return sorted(set(groups.values()), key=min)


class _Pool:
    """Candidates that are left, the best one at hand."""

    def __init__(self, candidates: set[frozenset[int]], score: Score, most: int) -> None:
        self._score, self._most = score, most
        self._left = candidates
        self._heap = [self._entry(each) for each in candidates]
        heapify(self._heap)
        self._with: dict[int, set[frozenset[int]]] = {}
        for each in candidates:
            self._list(each)

    def _entry(self, group: frozenset[int]) -> tuple[float, list[int]]:
        return self._score(group), sorted(group)

    def _list(self, group: frozenset[int]) -> None:
        for node in group:
            self._with.setdefault(node, set()).add(group)

    def take(self) -> frozenset[int] | None:
        """The candidate of least score, which is no candidate any more."""
        while self._heap:
            group = frozenset(heappop(self._heap)[1])
            if group in self._left:
                self._drop(group)
                return group
        return None

    def _drop(self, group: frozenset[int]) -> None:
        self._left.discard(group)
        for node in group:
            self._with[node].discard(group)

    def join(self, group: frozenset[int]) -> None:
        """A candidate that shares a node with the new group takes all of it, or is too large."""
        for other in {each for node in group for each in self._with[node]}:
            union = other | group
            if union == other:
                continue
            self._drop(other)
            if group < union and len(union) <= self._most and union not in self._left:
                self._left.add(union)
                self._list(union)
                heappush(self._heap, self._entry(union))
