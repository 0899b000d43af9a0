"""The shortest period and the earliest times for given orders and shifts: a maximum cycle ratio.

With the cyclic order on every resource fixed, each rule is a difference constraint
`t_v >= t_u + d_u - n * T`; the smallest feasible T is the maximum cycle ratio `sum(d) / sum(n)` of
that graph (Dasdan, Irani, Gupta 1999). From a lower bound on, the period is raised to the ratio of
a cycle for which Bellman-Ford finds it too short, until there is none (as Dinkelbach 1967 does for
any ratio).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from pipeplan.ilp.compiled import Ints, compiled
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.schedule import (
    OpId,
    Schedule,
    chain_ops,
    duration,
    position,
    resource,
)
from pipeplan.plan import Stage

Node = tuple[OpId, int]
"""(op, copy)."""


@dataclass(frozen=True, slots=True)
class _Graph:
    nodes: list[Node]
    edges: Ints
    """(source, target, length, periods) in rows."""

    def earliest(self, period: int) -> list[int] | None:
        """Earliest times at `period`, from 0; None if the period is too short."""
        times = np.zeros(len(self.nodes), np.int64)
        return times.tolist() if _settle(self.edges, period, times)[0] < 0 else None

    def shortest_period(self, lowest: int) -> int:
        """The shortest one >= `lowest`.

        Raises:
            ValueError: if no period is long enough, for the orders contradict each other.
        """
        period = int(_shortest_period(self.edges, len(self.nodes), lowest))
        if period < 0:
            raise ValueError("schedule: its orders contradict each other")
        return period


@compiled
def _shortest_period(edges: Ints, nodes: int, lowest: int) -> int:
    """Raise the period to what a cycle asks for that it is too short for; -1 if none suffices."""
    period = lowest
    while True:
        begin, behind = _settle(edges, period, np.zeros(nodes, np.int64))
        if begin < 0:
            return period
        edge = edges[behind[begin]]
        length, periods = edge[2], edge[3]
        while edge[0] != begin:
            edge = edges[behind[edge[0]]]
            length += edge[2]
            periods += edge[3]
        if periods <= 0:
            return -1
        period = -(-length // periods)


@compiled
def _settle(edges: Ints, period: int, times: Ints) -> tuple[int, Ints]:
    """Bellman-Ford: raise times until every edge holds.

    Args:
        edges: (source, target, length, periods) in rows.
        period: in ns.
        times: by node, 0; changed.

    Returns:
        A node of a cycle for which the period is too short, or -1; by node, the edge that raised
        its time last.
    """
    raised_by = np.full(len(times), -1)
    while True:
        raised = False
        for number in range(len(edges)):
            edge = edges[number]
            least = times[edge[0]] + edge[2] - edge[3] * period
            if least > times[edge[1]]:
                times[edge[1]], raised_by[edge[1]], raised = least, number, True
        if not raised:
            return -1, raised_by
        node = _on_a_cycle(edges, raised_by)
        if node >= 0:
            return node, raised_by


@compiled
def _on_a_cycle(edges: Ints, raised_by: Ints) -> int:
    """A node that raises itself, in several steps, or -1."""
    walks = np.full(len(raised_by), -1)
    for begin in range(len(raised_by)):
        node = begin
        while walks[node] < 0 and raised_by[node] >= 0:
            walks[node] = begin
            node = edges[raised_by[node], 0]
        if walks[node] == begin and raised_by[node] >= 0:
            return node
    return -1


def minimize_period_for_order(
    costs: CostModel, schedule: Schedule, lowest: int, instant: Collection[OpId] | None = None
) -> Schedule:
    """The same orders and shifts at the smallest period >= `lowest`, every op early.

    Args:
        costs: Durations in ns; they may exceed those the schedule was made with.
        schedule: Gives the orders and shifts; its times need only be consistent with them.
        lowest: A proven lower bound on the period in ns.
        instant: Ops that take no time in `schedule`, which says nothing of their order where they
            start together; None for those that take none by `costs`.

    Returns:
        A schedule that keeps (R2)-(R5), nothing offloaded; its memory is to be counted again.

    Raises:
        ValueError: if the orders contradict each other, whatever the period.
    """
    if instant is None:
        instant = instant_ops(costs, schedule.stages)
    graph = _graph(costs, schedule, instant)
    return _early(graph, schedule, graph.shortest_period(lowest))


def instant_ops(costs: CostModel, stages: tuple[Stage, ...]) -> frozenset[OpId]:
    """Ops that take no time."""
    return frozenset(op for op in chain_ops(stages) if not duration(costs, stages, op))


def _early(graph: _Graph, schedule: Schedule, period: int) -> Schedule:
    times = graph.earliest(period)
    assert times is not None, "the shortest period has times"
    early: dict[OpId, list[int]] = {op: [0] * schedule.k for op in chain_ops(schedule.stages)}
    for (op, copy), time in zip(graph.nodes, times, strict=True):
        early[op][copy] = time
    times_ = {op: tuple(row) for op, row in early.items()}
    return replace(schedule, period=period, times=times_, offloads=())


def _graph(costs: CostModel, schedule: Schedule, instant: Collection[OpId]) -> _Graph:
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
            for one, other, periods in _cyclic(schedule, instant, shared)
        ]
    return _Graph(nodes, np.array(edges))


def _cyclic(
    schedule: Schedule, instant: Collection[OpId], nodes: Sequence[Node]
) -> list[tuple[Node, Node, int]]:
    """Neighbours (u, v, n) in the cyclic order of one resource: v follows u, n periods apart."""
    period = schedule.period

    def time(node: Node) -> int:
        return schedule.times[node[0]][node[1]]

    def key(node: Node) -> tuple[int, bool, int, int]:
        """Zero-length ops first where starts are equal: they may not lie inside another.

        Among themselves older micro-batches are first, along the chain: no two resources have
        orders that contradict each other.
        """
        long, place = node[0] not in instant, position(schedule.stages, node[0])
        return time(node) % period, long, node[1] - time(node) // period * schedule.k, place

    ordered = sorted(nodes, key=key)
    neighbours = []
    for one, other in zip(ordered, ordered[1:] + ordered[:1], strict=True):
        wraps = int(other is ordered[0])
        quotient = time(one) // period - time(other) // period
        neighbours.append((one, other, quotient + wraps))
    return neighbours
