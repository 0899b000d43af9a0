"""The forward as a data-flow graph: its nodes are what a partition puts together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import networkx as nx

from pipeplan.operator_graph import PERMANENT, StorageKind
from pipeplan.remat.graph.ledger import Ledger


@dataclass(frozen=True)
class FlowValue:
    """A storage as nodes hand it on.

    Attributes:
        bytes: its size.
        maker: the node that makes it; None where it is an input.
        readers: nodes that read it.
        handed_out: whether it is there at the end of the forward, too.
    """

    bytes: int
    maker: int | None
    readers: frozenset[int]
    handed_out: bool


@dataclass(frozen=True)
class ForwardFlow:
    """Nodes 0, 1, .. in an order in which they may run, and what they hand on.

    Attributes:
        sizes: operations of the forward in each node.
        values: what passes between nodes.
        orders: further pairs of nodes of which the first runs before the second.
    """

    sizes: tuple[int, ...]
    values: tuple[FlowValue, ...]
    orders: tuple[tuple[int, int], ...] = ()

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs of a node and one that cannot run before it."""
        data = {
            (value.maker, reader)
            for value in self.values
            if value.maker is not None
            for reader in value.readers
        }
        return tuple(sorted({(a, b) for a, b in {*data, *self.orders} if a != b}))

    @cached_property
    def graph(self) -> nx.DiGraph[int]:
        """The nodes and edges."""
        found: nx.DiGraph[int] = nx.DiGraph()
        found.add_nodes_from(range(len(self.sizes)))
        found.add_edges_from(self.edges)
        return found

    def contracted(self, groups: Iterable[frozenset[int]]) -> tuple[ForwardFlow, list[list[int]]]:
        """With each group as one node, and the nodes that each new node was.

        The new ones are in an order in which they may run, early nodes first.

        Raises:
            networkx.NetworkXUnfeasible: if a group is not convex.
        """
        group_of = {node: min(group) for group in groups for node in group}
        of = [group_of.get(node, node) for node in range(len(self.sizes))]
        quotient: nx.DiGraph[int] = nx.DiGraph()
        quotient.add_nodes_from(of)
        quotient.add_edges_from((of[a], of[b]) for a, b in self.edges if of[a] != of[b])
        order = list(nx.lexicographical_topological_sort(quotient))
        place = {each: index for index, each in enumerate(order)}
        new = [place[each] for each in of]
        members: list[list[int]] = [[] for _ in order]
        for node, each in enumerate(new):
            members[each].append(node)
        values = (
            FlowValue(
                each.bytes,
                None if each.maker is None else new[each.maker],
                frozenset(new[node] for node in each.readers),
                each.handed_out,
            )
            for each in self.values
        )
        left = tuple(each for each in values if each.handed_out or each.readers - {each.maker})
        orders = tuple((new[a], new[b]) for a, b in self.orders if new[a] != new[b])
        sizes = tuple(sum(self.sizes[node] for node in each) for each in members)
        return ForwardFlow(sizes, left, orders), members


def forward_flow(ledger: Ledger) -> ForwardFlow:
    """Every operation of the forward as a node.

    Random operations keep their order (A3), and what reads the old values of a buffer stays before
    what makes the new ones (A4).
    """
    forwards = range(ledger.graph.forwards)
    maker = {s: at for at in forwards for s in ledger.writes[at]}
    storages = ledger.graph.storages
    readers: dict[int, set[int]] = {}
    for at in forwards:
        operation = ledger.graph.operations[at]
        for storage in (*operation.reads, *operation.writes):
            if storages[storage].kind not in PERMANENT:
                readers.setdefault(storage, set())
        for storage in operation.reads:
            if storage in readers:
                readers[storage].add(at)
    values = tuple(
        FlowValue(storages[s].bytes, maker.get(s), frozenset(read), s in ledger.outputs)
        for s, read in readers.items()
    )
    data = ForwardFlow((1,) * len(forwards), values)
    return replace(
        data, orders=tuple(each for each in _orders(ledger) if not nx.has_path(data.graph, *each))
    )


def _orders(ledger: Ledger) -> tuple[tuple[int, int], ...]:
    graph = ledger.graph
    random = [at for at in range(graph.forwards) if graph.operations[at].random]
    found = set(pairwise(random))
    for at in range(graph.forwards):
        targets = {
            name
            for s in ledger.writes[at]
            if graph.storages[s].kind is StorageKind.NEW_BUFFER
            for name in graph.storages[s].targets
        }
        old = {i for i, each in enumerate(graph.storages) if each.name in targets}
        found |= {
            (other, at) for other in range(at) if old.intersection(graph.operations[other].reads)
        }
    return tuple(sorted(found))
