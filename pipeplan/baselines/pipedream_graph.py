"""PipeDream's partition of a profiled graph, cut at antichains as the published tool cuts it.

A chain can be cut only where every path passes one operation. PipeDream also cuts through the
branches between: a state is a set of operations closed under predecessors, a stage is what one
state has more than another, and a cut carries every output that is still needed behind it. Such
stages have no place in a chain, so this serves to compare partitions with the published tool.

Source: D. Narayanan et al., "PipeDream" (SOSP 2019), section 3.1 and its optimizer; rederived.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from pipeplan.baselines.pipedream import NEVER, Partition, PartitionTables, Table, cut_ns
from pipeplan.errors import InputError
from pipeplan.importers.linearize import Graph, operation, without_dead_ends

MOST_STATES = 4000
"""Tables have this many rows and columns at most; branches multiply states."""

State = frozenset[str]


@dataclass(frozen=True, slots=True)
class GraphPartition:
    """Names of the operations of each stage, and what PipeDream says of the partition."""

    stages: tuple[State, ...]
    period_ns: int
    memory_bytes: int


def partition(
    graph: Graph,
    stages: int,
    bandwidth: int | None,
    target_bytes: int | None = None,
) -> GraphPartition | None:
    """The best partition of `graph` into `stages` stages on equal GPUs; None if none fits.

    Args:
        graph: operations of a profile; data from outside takes no part.
        stages: how many GPUs.
        bandwidth: of each link in bytes/s; None is infinite.
        target_bytes: limit of PipeDream's memory rule; None switches it off.

    Raises:
        InputError: if the graph has more states than tables can hold.
    """
    inner = without_dead_ends(graph)
    inner.remove_nodes_from([name for name in list(inner) if operation(inner, name).is_input])
    states = _states(inner)
    found = _problem(inner, states, stages, bandwidth).solve(target_bytes)
    return None if found is None else _named(states, found)


def _named(states: list[State], found: Partition) -> GraphPartition:
    ends = [states[end] for end in found.ends]
    begins = [states[0], *ends[:-1]]
    parts = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
    return GraphPartition(parts, found.period_ns, found.memory_bytes)


def _states(graph: Graph) -> list[State]:
    """All sets closed under predecessors, smaller ones first; the empty one and all included."""
    layer: set[State] = {frozenset()}
    states: list[State] = []
    while layer:
        states += sorted(layer, key=sorted)
        if len(states) > MOST_STATES:
            raise InputError(
                f"PipeDream partition: got a graph of more than {MOST_STATES} states, need fewer:"
                " it has too many parallel branches."
            )
        layer = {state | {name} for state in layer for name in _next(graph, state)}
    return states


def _next(graph: Graph, state: State) -> Iterator[str]:
    """Operations whose predecessors are all in `state`, themselves not."""
    for name in graph:
        if name not in state and state.issuperset(graph.predecessors(name)):
            yield name


def _problem(
    graph: Graph, states: list[State], stages: int, bandwidth: int | None
) -> PartitionTables:
    ops = {name: operation(graph, name) for name in graph}
    work = _differences([sum(ops[n].forward_ns + ops[n].backward_ns for n in s) for s in states])
    counted = _differences(
        [sum(ops[n].output_bytes + ops[n].weight_bytes for n in s) for s in states]
    )
    inside = np.array([[name in state for name in graph] for state in states])
    later = np.array([[bool(np.all(b[a])) and a.sum() < b.sum() for b in inside] for a in inside])
    crossing = [
        sum(ops[n].output_bytes for n in state if not state.issuperset(graph.successors(n)))
        for state in states[1:-1]
    ]
    cut = np.array([NEVER, *(cut_ns(size, bandwidth) for size in crossing), NEVER])
    works = np.where(later, work, NEVER)
    return PartitionTables((works,) * stages, (cut,) * (stages - 1), counted)


def _differences(sums: list[int]) -> Table:
    table = np.array(sums, dtype=np.int64)
    return table[None, :] - table[:, None]
