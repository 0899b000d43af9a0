"""The shortest period and the earliest times for given orders and shifts: a maximum cycle ratio.

With the cyclic order on every resource fixed, each rule is a difference constraint
`t_v >= t_u + d_u - n * T`; the smallest feasible T is the maximum cycle ratio `sum(d) / sum(n)` of
that graph (Dasdan, Irani, Gupta 1999), found by bisection on integers with Bellman-Ford (numpy).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.schedule import (
    OpId,
    Schedule,
    chain_ops,
    duration,
    position,
    resource,
)

Array = NDArray[np.int64]
Node = tuple[OpId, int]
"""(op, copy)."""


@dataclass(frozen=True, slots=True)
class _Graph:
    nodes: list[Node]
    source: Array
    target: Array
    length: Array
    periods: Array

    def earliest(self, period: int) -> Array | None:
        """Earliest times at `period`, from 0; None if the period is too short."""
        weight = self.length - self.periods * period
        times = np.zeros(len(self.nodes), dtype=np.int64)
        for _ in range(len(self.nodes) + 1):
            before = times.copy()
            np.maximum.at(times, self.target, times[self.source] + weight)
            if np.array_equal(before, times):
                return times
        return None


def minimize_period_for_order(costs: CostModel, schedule: Schedule, lowest: int) -> Schedule:
    """The same orders and shifts at the smallest period >= `lowest`, every op early.

    Args:
        costs: Durations in ns; they may exceed those the schedule was made with.
        schedule: Gives the orders and shifts; its times need only be consistent with them.
        lowest: A proven lower bound on the period in ns.

    Returns:
        A schedule that keeps (R2)-(R5), nothing offloaded; its memory is to be counted again.
    """
    graph = _graph(costs, schedule)
    low, high = lowest, max(lowest, schedule.period)
    while graph.earliest(high) is None:
        low, high = high + 1, 2 * high
    while low < high:
        middle = (low + high) // 2
        if graph.earliest(middle) is None:
            low = middle + 1
        else:
            high = middle
    return asap_times(costs, schedule, high)


def asap_times(costs: CostModel, schedule: Schedule, period: int) -> Schedule:
    """The same orders and shifts at `period`, every op as early as possible.

    Raises:
        ValueError: if the period is too short for these orders.
    """
    graph = _graph(costs, schedule)
    times = graph.earliest(period)
    if times is None:
        raise ValueError(f"period: got {period}, need more for these orders")
    early: dict[OpId, list[int]] = {op: [0] * schedule.k for op in chain_ops(schedule.stages)}
    for (op, copy), time in zip(graph.nodes, times, strict=True):
        early[op][copy] = int(time)
    times_ = {op: tuple(row) for op, row in early.items()}
    return replace(schedule, period=period, times=times_, offloads=())


def _graph(costs: CostModel, schedule: Schedule) -> _Graph:
    """Precedence, FIFO and cyclic orders as (source, target, length, periods) edges."""
    ops = chain_ops(schedule.stages)
    nodes = [(op, copy) for copy in range(schedule.k) for op in ops]
    index = {node: number for number, node in enumerate(nodes)}
    lengths = {op: duration(costs, schedule.stages, op) for op in ops}
    edges: list[tuple[int, int, int, int]] = []
    for op, following in pairwise(ops):
        for copy in range(schedule.k):
            edges.append((index[op, copy], index[following, copy], lengths[op], 0))
    for op in ops:
        for copy in range(schedule.k):
            after = (copy + 1) % schedule.k
            edges.append((index[op, copy], index[op, after], lengths[op], int(after == 0)))
    by_resource: dict[tuple[int, ...], list[Node]] = {}
    for node in nodes:
        by_resource.setdefault(resource(costs, schedule.stages, node[0]), []).append(node)
    for shared in by_resource.values():
        edges += [
            (index[one], index[other], lengths[one[0]], periods)
            for one, other, periods in _cyclic(schedule, lengths, shared)
        ]
    table = np.array(edges, dtype=np.int64).T
    return _Graph(nodes, table[0], table[1], table[2], table[3])


def _cyclic(
    schedule: Schedule, lengths: dict[OpId, int], nodes: Sequence[Node]
) -> list[tuple[Node, Node, int]]:
    """Neighbours (u, v, n) in the cyclic order of one resource: v follows u, n periods apart."""
    period = schedule.period

    def time(node: Node) -> int:
        return schedule.times[node[0]][node[1]]

    def key(node: Node) -> tuple[int, bool, int, int]:
        """Zero-length ops first where starts are equal: they may not lie inside another."""
        long, place = lengths[node[0]] > 0, position(schedule.stages, node[0])
        return time(node) % period, long, node[1] - time(node) // period * schedule.k, place

    ordered = sorted(nodes, key=key)
    neighbours = []
    for one, other in zip(ordered, ordered[1:] + ordered[:1], strict=True):
        wraps = int(other is ordered[0])
        quotient = time(one) // period - time(other) // period
        neighbours.append((one, other, quotient + wraps))
    return neighbours
