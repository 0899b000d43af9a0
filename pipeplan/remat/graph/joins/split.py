"""Where a graph is a join: branches that do not read each other, and the tail that reads all.

The tail begins with one operation and is all that depends on it. What is left of the forward falls
apart into branches. They may exchange small storages, as buffers that one tower updates after the
other: these make an order between branches, and no memory to speak of.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import networkx as nx

from pipeplan.remat.graph.blocks.block import GraphBlock, extract
from pipeplan.remat.graph.hierarchy.data_flow import forward_flow
from pipeplan.remat.graph.ledger import Ledger

SMALL = 256
"""How many times smaller than the largest one a storage is that branches may exchange."""
LEAST_SHARE = 0.1
"""Of the forward's time, in a branch."""
LOOSE = -1
"""The part of an operation that runs as soon as what it reads is there."""
_SOURCE = -1
"""A node before all operations of a branch, which dominates them."""


@dataclass(frozen=True)
class GraphJoin:
    """A graph as branches and a tail.

    Attributes:
        branches: each as a graph of its own.
        tail: what reads all of them, the loss in it.
        loose: operations of no part: sums of what several branches give, and small ones.
    """

    branches: tuple[GraphBlock, ...]
    tail: GraphBlock
    loose: tuple[int, ...]


def find_join(ledger: Ledger) -> GraphJoin | None:
    """The join whose smallest branch has most of the time; None where the graph is none."""
    graph = _forward(ledger)
    best: tuple[float, dict[int, int]] | None = None
    for first in range(ledger.graph.forwards):
        found = _parts(ledger, graph, first)
        if found is not None and (best is None or found[0] > best[0]):
            best = found
    if best is None:
        return None
    part = best[1]
    part.update(_backward_parts(ledger, part))
    return _extracted(ledger, part)


def _forward(ledger: Ledger) -> nx.DiGraph[int]:
    """Forwards, with an edge from the maker of a storage to each reader, and its bytes.

    An order that (A3) and (A4) ask for is an edge without bytes: what must run behind the tail's
    first operation is of the tail.
    """
    found: nx.DiGraph[int] = nx.DiGraph()
    found.add_nodes_from(range(ledger.graph.forwards))
    found.add_edges_from(forward_flow(ledger).edges, bytes=0)
    maker = {s: at for at in found for s in ledger.writes[at]}
    for at in found:
        for s in ledger.reads[at]:
            if s in maker:
                edge = found.edges[maker[s], at]
                edge["bytes"] = max(edge["bytes"], ledger.size[s])
    return found


def _parts(
    ledger: Ledger, graph: nx.DiGraph[int], first: int
) -> tuple[float, dict[int, int]] | None:
    """Least share of a branch, and the part of each forward, if the tail begins with `first`.

    Branches are numbered from 0 in the order of the graph; the tail comes behind the last one.
    """
    if graph.in_degree(first) < 2:
        return None
    tail = {first, *nx.descendants(graph, first)}
    small = max(ledger.size) // SMALL
    large: nx.Graph[int] = nx.Graph()
    large.add_nodes_from(at for at in graph if at not in tail)
    large.add_edges_from(
        (a, b)
        for a, b, size in graph.edges(data="bytes")
        if size > small and {a, b}.isdisjoint(tail)
    )
    whole = max(1, sum(ledger.time[: ledger.graph.forwards]))
    branches = []
    for each in sorted(map(frozenset, nx.connected_components(large)), key=min):
        if sum(ledger.time[at] for at in each) >= LEAST_SHARE * whole:
            branches.append(_before_the_tail(graph, each, tail))
            tail |= each - branches[-1]
    shares = [sum(ledger.time[at] for at in each) / whole for each in branches]
    if len(branches) < 2 or min(shares) < LEAST_SHARE:
        return None
    part = {at: index for index, each in enumerate(branches) for at in each}
    before = {b for at in part for b in nx.ancestors(graph, at)}
    for at in graph:
        if at not in part:
            needs = at in tail or any(b in tail for b in graph.successors(at))
            part[at] = len(branches) if needs and at not in before else LOOSE
    return min(shares), part


def _before_the_tail(
    graph: nx.DiGraph[int], branch: frozenset[int], tail: Collection[int]
) -> frozenset[int]:
    """What of a branch leads to the operation through which all goes that the tail reads of it.

    What is behind that one, as keys and values that each layer of a decoder makes of an encoder's
    output, is better made when the tail needs it. All of the branch where there is no such
    operation, or another branch waits for what is behind it; nothing where the tail reads none.
    """
    inside: nx.DiGraph[int] = nx.DiGraph(graph.subgraph(branch))
    inside.add_edges_from((_SOURCE, at) for at in branch if not inside.in_degree(at))
    parent = nx.immediate_dominators(inside, _SOURCE)
    ends = {
        at
        for at in branch
        for b in graph.successors(at)
        if b in tail and graph.edges[at, b]["bytes"]
    }
    if not ends:
        return frozenset()

    def above(at: int) -> list[int]:
        path = [at]
        while path[-1] != _SOURCE:
            path.append(parent[path[-1]])
        return path

    paths = [above(at) for at in ends]
    common = set.intersection(*map(set, paths)) - {_SOURCE}
    last = next((at for at in paths[0] if at in common), None)
    if last is None:
        return branch
    before = frozenset((nx.ancestors(inside, last) | {last}) - {_SOURCE})
    behind = {b for at in branch - before for b in graph.successors(at)}
    return before if behind <= branch.union(tail) else branch


def _backward_parts(ledger: Ledger, part: dict[int, int]) -> dict[int, int]:
    """The part of each backward: the branch that its gradients come from, if it is one.

    Else it is of the part whose forwards touch all that it reads of the forward: a branch rather
    than the tail. What gradients of several branches go into is loose, and all that depends on it.
    """
    graph, tail = ledger.graph, max(part.values())
    touched: list[set[int]] = [set() for _ in range(tail + 1)]
    for at in range(graph.forwards):
        if part[at] != LOOSE:
            touched[part[at]].update(graph.operations[at].reads, graph.operations[at].writes)
    known = set.union(*touched)
    found: dict[int, int] = {}
    of: dict[int, int] = {}
    for at in range(graph.forwards, len(graph.operations)):
        reads = graph.operations[at].reads
        forward = known.intersection(reads)
        fitting = [index for index, each in enumerate(touched) if forward and forward <= each]
        owners = {of[s] for s in reads if s in of} - {tail}
        if len(owners) > 1 or LOOSE in owners:
            found[at] = LOOSE
        elif owners:
            found[at] = owners.pop()
        else:
            branches = [index for index in fitting if index != tail]
            found[at] = branches[0] if len(branches) == 1 else tail
        of.update(dict.fromkeys(ledger.writes[at], found[at]))
    return found


def _extracted(ledger: Ledger, part: dict[int, int]) -> GraphJoin:
    """Each part as a graph of its own; what only other branches read is none of its outputs."""
    tail, graph = max(part.values()), ledger.graph
    made: dict[int, int] = {}
    read: dict[int, set[int]] = {}
    for at in sorted(part):
        for s in ledger.writes[at]:
            made.setdefault(s, at)
        for s in ledger.reads[at]:
            read.setdefault(s, set()).add(at)

    def crossing(makers: range, source: int | None, target: int | None) -> tuple[int, ...]:
        """What operations among `makers` of part `source` make and part `target` reads."""
        return tuple(
            s
            for s, at in made.items()
            if at in makers
            and (source is None or part[at] == source)
            and any(part[each] != part[at] for each in read.get(s, ()))
            and (target is None or (part[at] != target and target in map(part.get, read[s])))
        )

    forward, backward = range(graph.forwards), range(graph.forwards, len(graph.operations))
    branches = tuple(
        extract(
            ledger,
            [at for at in sorted(part) if part[at] == branch],
            inputs=[s for s in crossing(forward, None, branch) if part[made[s]] != tail],
            gradients=crossing(backward, None, branch),
            outputs=crossing(forward, branch, tail),
            returned=(*crossing(backward, branch, None), *ledger.handed_back),
        )
        for branch in range(tail)
    )
    last = extract(
        ledger,
        [at for at in sorted(part) if part[at] == tail],
        inputs=crossing(forward, None, tail),
        gradients=ledger.tangents,
        outputs=ledger.outputs,
        returned=(*crossing(backward, tail, None), *ledger.handed_back),
    )
    return GraphJoin(branches, last, tuple(at for at in sorted(part) if part[at] == LOOSE))
