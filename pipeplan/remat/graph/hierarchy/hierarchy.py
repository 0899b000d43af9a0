"""H-Solver: ways of each distinct cluster from the lowest level up, then the whole graph."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from pipeplan.operator_graph import OperatorGraph
from pipeplan.remat.graph.blocks.block import average
from pipeplan.remat.graph.blocks.options import OptionSet, grid, solve_grid
from pipeplan.remat.graph.hierarchy.cluster import HCluster, clusters
from pipeplan.remat.graph.hierarchy.data_flow import forward_flow
from pipeplan.remat.graph.hierarchy.h_partition import Sizes, h_partition
from pipeplan.remat.graph.hierarchy.level import ClusterLevel, ClusterPart
from pipeplan.remat.graph.hierarchy.solve_level import LevelPlan, LevelSolver
from pipeplan.remat.graph.hierarchy.ways import ClusterWay, best_ways
from pipeplan.remat.graph.intervals.search import SearchLimits
from pipeplan.remat.graph.ledger import Ledger, Order
from pipeplan.remat.graph.orders import fits, time_of

MOST_WAYS = 8
"""Of a cluster, that the level above chooses from."""
HEADROOM = 1.25
"""Of a budget, up to what its level is given."""
_TRIES = 4


@dataclass
class Hierarchy:
    """A graph as clusters of clusters, with ways of each.

    Attributes:
        ledger: the whole graph.
        sizes: of the levels.
        count: peaks, and saved bytes per peak, for which a cluster is solved.
        runs: how often a forward may run inside a cluster.
        most: ways of a cluster.
    """

    ledger: Ledger
    sizes: Sizes = field(default_factory=Sizes)
    count: int = 5
    runs: int = 2
    most: int = MOST_WAYS
    ways: dict[str, tuple[ClusterWay, ...]] = field(default_factory=dict)

    @cached_property
    def top(self) -> tuple[HCluster, ...]:
        """The clusters of the highest level."""
        return clusters(self.ledger, h_partition(forward_flow(self.ledger), self.sizes))

    @cached_property
    def distinct(self) -> list[tuple[HCluster, OperatorGraph]]:
        """One of each kind of cluster, lower levels first, with mean times of identical ones."""
        alike: dict[str, list[HCluster]] = {}
        for each in (inner for cluster in self.top for inner in cluster.walk()):
            alike.setdefault(each.key, []).append(each)
        return [(same[0], average([each.block.graph for each in same])) for same in alike.values()]

    def solve_ways(self, limits: SearchLimits, deadline: float) -> None:
        """Ways of each distinct cluster until the deadline on `time.monotonic`."""
        waiting = sum(graph.forwards > 1 for _, graph in self.distinct)
        for cluster, graph in self.distinct:
            share = (deadline - time.monotonic()) / max(1, waiting)
            self.ways[cluster.key] = self._ways(cluster, graph, limits, share)
            waiting -= graph.forwards > 1

    def _ways(
        self, cluster: HCluster, graph: OperatorGraph, limits: SearchLimits, seconds: float
    ) -> tuple[ClusterWay, ...]:
        options = OptionSet(graph, self.runs)
        end = time.monotonic() + seconds
        if cluster.inside:
            orders = self._combined(cluster, options, limits, end)
        elif graph.forwards > 1:
            solve_grid(options, self.count, limits, end)
            orders = [each.order for each in options.options]
        else:
            orders = []
        return best_ways(options.ledger, [options.first.order, *orders], self.most)

    def _combined(
        self, cluster: HCluster, options: OptionSet, limits: SearchLimits, end: float
    ) -> list[Order]:
        """Orders at a grid of budgets from ways of the clusters inside.

        A budget is passed over where a larger one has no plan, or one that keeps it and is best.
        """
        ledger = options.ledger
        solver = self._solver(ledger, cluster.inside, cluster)
        budgets = grid(options, self.count)
        orders, best = list[Order](), [options.first.order]
        failed, plan = list[tuple[int, int]](), None
        for index, (peak, saved) in enumerate(budgets):
            left = (end - time.monotonic()) / (len(budgets) - index)
            known = any(fits(ledger, each, peak + ledger.constant, saved) for each in best)
            if known or left <= 0 or any(p >= peak and s >= saved for p, s in failed):
                continue
            given = replace(limits, seconds=min(left, limits.seconds))
            found = solver.solve(peak, saved, given, plan)
            if found is None:
                failed.append((peak, saved))
                continue
            plan = found
            orders.append(solver.level.order(found.runs, found.ways))
            if found.proven:
                best.append(orders[-1])
        return orders

    def _solver(
        self, parent: Ledger, inside: Sequence[HCluster], cluster: HCluster | None = None
    ) -> LevelSolver:
        return LevelSolver(
            ClusterLevel(parent, tuple(self._part(each, cluster) for each in inside)), self.runs
        )

    def _part(self, cluster: HCluster, parent: HCluster | None) -> ClusterPart:
        block = cluster.block
        operations, storages = block.operations, block.storages
        if parent is not None:
            at, of = parent.local, parent.local_storages
            operations = tuple(at[each] for each in operations)
            storages = tuple(of[each] for each in storages)
        once = any(each.once for each in block.graph.operations[: block.graph.forwards])
        return ClusterPart(
            operations, storages, block.graph.forwards, self.ways[cluster.key], once
        )

    @cached_property
    def highest(self) -> LevelSolver:
        """The whole graph as a level of its highest clusters."""
        return self._solver(self.ledger, self.top)

    def orders(
        self, peak: int, saved: int | None, limits: SearchLimits, deadline: float
    ) -> Iterator[Order]:
        """Orders within budgets, static bytes included, each faster than the ones before.

        Peaks of clusters do not fall together, so that a level counts more than its order holds:
        of the bytes that it may be given, from the budget on, those are bisected whose order
        keeps the budget.
        """
        first = self.ledger.first_order()
        if fits(self.ledger, first, peak, saved):
            yield first
            return
        room = peak - self.ledger.constant
        best: Order | None = None
        plan: LevelPlan | None = None
        low, high = room, int(HEADROOM * room)
        given = room
        for index in range(_TRIES):
            share = (deadline - time.monotonic()) / (_TRIES - index)
            if share <= 0:
                break
            seconds = min(share, limits.seconds)
            found = self.highest.solve(given, saved, replace(limits, seconds=seconds), plan)
            order = None
            if found is not None:
                plan = found
                order = self.highest.level.order(found.runs, found.ways)
            if order is None or fits(self.ledger, order, peak, saved):
                low = given
                if order is not None and (best is None or self._faster(order, best)):
                    best = order
                    yield best
            else:
                high = given
            given = (low + high) // 2

    def _faster(self, one: Order, other: Order) -> bool:
        return time_of(self.ledger, one) < time_of(self.ledger, other)
