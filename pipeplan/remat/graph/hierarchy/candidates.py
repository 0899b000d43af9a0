"""Which nodes may form a group, and what a group costs as a subgraph.

X. Zhao's thesis, sections 3.3.1 to 3.3.3. A candidate has a head: nothing but the head is read
from outside by what is behind it (3.2), and all of it is behind the head (3.3), so that it is
convex, and so is the union of two that share a node (Theorem 3.3.2). That holds where a(x), the
closest common ancestor of the predecessors of x, is on every path to x: it is the immediate
dominator of x here. Where the head is in the candidate, (3.2) does not hold for the head itself;
the proofs need it for the others alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import networkx as nx

from pipeplan.remat.graph.hierarchy.data_flow import ForwardFlow

ALPHA = 0.5
"""Exponent of the number of operations in the score, the default of the thesis."""


def dominated(flow: ForwardFlow, most: int) -> Iterator[frozenset[int]]:
    """Per node x all nodes on all paths from a(x) to x, with and without both, up to `most`."""
    rooted = flow.graph.copy()
    rooted.add_edges_from((-1, node) for node in flow.graph if not flow.graph.in_degree(node))
    closest = nx.immediate_dominators(rooted, -1)
    behind = _reached(flow)
    for node in flow.graph:
        head = closest[node]
        inside = behind[node] if head == -1 else behind[node] & ~_before(behind, head, node)
        if inside.bit_count() > most + 2:
            continue
        between = frozenset(_bits(inside)) - {node, head}
        tops = [frozenset[int]()] if head == -1 else [frozenset[int](), frozenset({head})]
        for top in tops:
            for last in (frozenset[int](), frozenset({node})):
                found = between | top | last
                if 1 < len(found) <= most:
                    yield found


def _reached(flow: ForwardFlow) -> list[int]:
    """Per node the set of its ancestors and itself, as bits."""
    found = [1 << node for node in range(len(flow.sizes))]
    for node in nx.topological_sort(flow.graph):
        for before in flow.graph.predecessors(node):
            found[node] |= found[before]
    return found


def _before(behind: list[int], head: int, node: int) -> int:
    """Ancestors of `node` that are not behind `head`."""
    return sum(1 << each for each in _bits(behind[node]) if not behind[each] >> head & 1)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def windows(flow: ForwardFlow, most: int) -> Iterator[frozenset[int]]:
    """2 to `most` neighbours in the order of the nodes (ours).

    They are convex, as an order has no path back, and so are unions of two that share a node. A
    value that many nodes read, as an encoder's output or what a U-Net keeps for its way up, leaves
    few close dominators; neighbours with little between them and others there are.
    """
    count = len(flow.sizes)
    for begin in range(count):
        for end in range(begin + 2, min(begin + most, count) + 1):
            yield frozenset(range(begin, end))


class Score:
    """s_alpha (3.1): bytes of a group's inputs and outputs, times operations to the alpha."""

    def __init__(self, flow: ForwardFlow, alpha: float = ALPHA) -> None:
        self._flow, self._alpha = flow, alpha
        self._near: list[list[int]] = [[] for _ in flow.sizes]
        for index, value in enumerate(flow.values):
            ends = value.readers if value.maker is None else value.readers | {value.maker}
            for node in ends:
                self._near[node].append(index)

    def __call__(self, group: frozenset[int]) -> float:
        """The lower the better."""
        crossing = 0
        for index in {each for node in group for each in self._near[node]}:
            value = self._flow.values[index]
            leaves = value.handed_out or not value.readers <= group
            if value.maker not in group or leaves:
                crossing += value.bytes
        operations = sum(self._flow.sizes[node] for node in group)
        return crossing * float(operations**self._alpha)
