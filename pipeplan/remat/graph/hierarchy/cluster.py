"""Clusters: groups of forwards with their backwards, as graphs of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from pipeplan.remat.graph.blocks.block import GraphBlock, extract
from pipeplan.remat.graph.hierarchy.h_partition import Group
from pipeplan.remat.graph.hierarchy.partners import backward_order, partners
from pipeplan.remat.graph.ledger import END_F, Ledger


@dataclass(frozen=True)
class HCluster:
    """Forward operations and their backward operations (X. Zhao's thesis, Definition 3.2.1).

    Attributes:
        block: them as a graph, whose storages that others read or make are its interface
            (Definition 3.2.4).
        inside: the clusters that it is partitioned into; none where it is solved as a whole.
    """

    block: GraphBlock
    inside: tuple[HCluster, ...] = ()

    @property
    def key(self) -> str:
        """What identical clusters share (section 3.3.5)."""
        return self.block.key

    @cached_property
    def local(self) -> dict[int, int]:
        """From indices of operations of the whole graph to those of the cluster's."""
        return {at: index for index, at in enumerate(self.block.operations)}

    @cached_property
    def local_storages(self) -> dict[int, int]:
        """The same of storages."""
        return {storage: index for index, storage in enumerate(self.block.storages)}

    def walk(self) -> Iterator[HCluster]:
        """The clusters inside, at all levels, and then itself."""
        for each in self.inside:
            yield from each.walk()
        yield self


def clusters(ledger: Ledger, top: Group) -> tuple[HCluster, ...]:
    """The clusters of the highest level, in an order in which their forwards may run."""
    return _Clusters(ledger, top).of(top.nodes)


class _Clusters:
    """What is known of the whole graph while its clusters are made."""

    def __init__(self, ledger: Ledger, top: Group) -> None:
        self.ledger = ledger
        order = top.operations
        self.place = {at: place for place, at in enumerate(order)}
        self.behind: dict[int, list[int]] = {}
        found = partners(ledger, order)
        for at in backward_order(ledger, found):
            self.behind.setdefault(found[at], []).append(at)
        self.readers: dict[int, set[int]] = {}
        for at in ledger.first_order():
            for storage in ledger.needed(at):
                self.readers.setdefault(storage, set()).add(at)

    def of(self, nodes: Sequence[int | Group]) -> tuple[HCluster, ...]:
        return tuple(self.cluster(node) for node in nodes)

    def cluster(self, node: int | Group) -> HCluster:
        if isinstance(node, int):
            return HCluster(self.block((node,)))
        alone = all(isinstance(each, int) for each in node.nodes)
        return HCluster(self.block(node.operations), () if alone else self.of(node.nodes))

    def block(self, forwards: Sequence[int]) -> GraphBlock:
        ledger = self.ledger
        places = sorted((self.place[at] for at in forwards), reverse=True)
        operations = (*forwards, *(at for each in places for at in self.behind.get(each, ())))
        inside = set(operations)
        made = {s: at for at in operations for s in ledger.writes[at]}
        read = {s for at in operations for s in ledger.reads[at]} - made.keys()
        early = {s for at in range(ledger.graph.forwards) for s in ledger.writes[at]}
        early |= set(ledger.received)
        leaving = [
            s
            for s in made
            if s in ledger.handed_back or not self.readers.get(s, set()) <= inside - {END_F}
        ]
        return extract(
            ledger,
            operations,
            inputs=read & early,
            gradients=sorted(read - early),
            outputs=[s for s in leaving if made[s] < ledger.graph.forwards],
            returned=[s for s in leaving if made[s] >= ledger.graph.forwards],
        )
