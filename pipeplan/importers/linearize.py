"""A DAG of operations becomes a sequence of groups, cut where every path passes.

Beaumont, Eyraud-Dubois, Shilova (2020), §7: minimal groups that follow each other in a
straightforward order. Cutting at one operation that every path passes leaves exactly one tensor
at each boundary.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

import networkx as nx

from pipeplan.errors import InputError

_BOOKKEEPING = {"Size", "View", "Transpose", "Permute", "Squeeze", "Unsqueeze", "__getitem__"}


@dataclass(frozen=True, slots=True)
class ImportedOperation:
    """One node of a profiled graph: its times in ns, its output and its parameters in bytes."""

    name: str
    text: str
    forward_ns: int
    backward_ns: int
    output_bytes: int
    weight_bytes: int

    @property
    def kind(self) -> str:
        """`Conv2d` of `Conv2d(3, 64, ...)`."""
        return self.text.partition("(")[0]

    @property
    def is_input(self) -> bool:
        """Whether it stands for data from outside and computes nothing of the model."""
        return re.fullmatch(r"Input\d*", self.kind) is not None

    @property
    def is_bookkeeping(self) -> bool:
        """Whether its output is another view of its input's storage, or no tensor at all."""
        return self.kind in _BOOKKEEPING

    @property
    def is_inplace(self) -> bool:
        """Whether it overwrites one of its inputs."""
        return "inplace" in self.text.replace("inplace=False", "")

    @property
    def is_free(self) -> bool:
        """Whether it takes no time and has no parameters."""
        return self.forward_ns == self.backward_ns == self.weight_bytes == 0


Graph: TypeAlias = nx.DiGraph
"""Nodes are names; each has its `ImportedOperation` as attribute `operation`."""


def operation(graph: Graph, name: str) -> ImportedOperation:
    """The operation of the node `name`."""
    found: ImportedOperation = graph.nodes[name]["operation"]
    return found


def groups(graph: Graph, where: str) -> list[list[str]]:
    """Names of all operations but the inputs, in order, in groups that follow each other.

    A group ends at an operation that every path from any input to any output passes. A group
    that starts by overwriting its input, or that is free and does not enlarge the boundary,
    belongs to the one before it: nothing is gained by a cut there.

    Raises:
        InputError: if the graph has a cycle, or nothing but inputs.
    """
    order = _order(graph, where)
    found: list[list[str]] = [[]]
    for name, ends in zip(order, _is_cut(graph, order), strict=True):
        if not operation(graph, name).is_input:
            found[-1].append(name)
        if ends and found[-1]:
            found.append([])
    found = [group for group in found if group]
    if not found:
        raise InputError(f"{where}: got no operation but inputs, need at least one")
    return _merged(graph, found)


def storages(graph: Graph, group: list[str]) -> dict[str, str]:
    """For each operation of `group`, the one whose output storage its own output is.

    A view shares its largest predecessor's. An operation in place overwrites a predecessor of its
    size that nobody else reads; where there are several, the sum of bytes is the same for each.
    """
    owner: dict[str, str] = {}
    for name in group:
        op, shared = operation(graph, name), list(graph.predecessors(name))
        if op.is_inplace:
            shared = [
                other
                for other in shared
                if operation(graph, other).output_bytes == op.output_bytes
                and graph.out_degree(other) == 1
            ]
        elif not op.is_bookkeeping:
            shared = []
        viewed = max(shared, key=lambda other: operation(graph, other).output_bytes, default=name)
        owner[name] = owner.get(viewed, viewed)
    return owner


def _order(graph: Graph, where: str) -> list[str]:
    """A topological order; among equals, names with smaller numbers first."""
    rank = {
        name: (int(digits) if (digits := re.sub(r"\D", "", name)[:18]) else 0, name)
        for name in graph
    }
    try:
        return list(nx.lexicographical_topological_sort(graph, key=rank.__getitem__))
    except nx.NetworkXUnfeasible:
        cycle = [source for source, _ in nx.find_cycle(graph)]
        shown = " -> ".join([*cycle[:6], "..."] if len(cycle) > 6 else [*cycle, cycle[0]])
        raise InputError(f"{where}: got the cycle {shown}, need a graph without cycles") from None


def without_dead_ends(graph: Graph) -> Graph:
    """`graph` less views, sizes and inputs that nobody reads, unless nothing else is an output."""
    kept = graph.copy()
    while True:
        ends = [operation(kept, name) for name in kept if not kept.out_degree(name)]
        idle = [op.name for op in ends if op.is_bookkeeping or op.is_input]
        if not idle or len(idle) == len(ends):
            return kept
        kept.remove_nodes_from(idle)


def _is_cut(graph: Graph, order: list[str]) -> list[bool]:
    """Whether every path passes each operation of `order`: no edge jumps over it.

    A path that avoids the operation at some position has an edge from before it to behind it, and
    every such edge lies on such a path. Data enters before the first and leaves behind the last.
    """
    position = {name: place for place, name in enumerate(order)}
    last = len(order) - 1
    reach, cuts = -1, []
    unseen = {name for name in order if not graph.in_degree(name)}
    for place, name in enumerate(order):
        unseen.discard(name)
        cuts.append(reach <= place and not unseen)
        behind = [position[other] for other in graph.successors(name)]
        reach = max([reach, *behind]) if behind else (reach if place == last else last + 1)
    return cuts


def _merged(graph: Graph, found: list[list[str]]) -> list[list[str]]:
    merged = [list(found[0])]
    busy = not _is_free(graph, found[0])
    for group in found[1:]:
        output = operation(graph, group[-1]).output_bytes
        idle = _is_free(graph, group)
        smaller = output <= operation(graph, merged[-1][-1]).output_bytes
        if not busy or operation(graph, group[0]).is_inplace or (idle and smaller):
            merged[-1].extend(group)
        else:
            merged.append(list(group))
        busy = busy or not idle
    return merged


def _is_free(graph: Graph, group: list[str]) -> bool:
    return all(operation(graph, name).is_free for name in group)
