"""Best-first enumeration of all allocations of few layers on few GPUs, by lower bounds.

For k = 1 branch and bound on the orders of its ops decides most allocations in milliseconds
(`branch_and_bound`). CP-SAT decides most others in a few tenths of a second, scaled as
`exact_scaling` says: their models are much smaller than one over all allocations. Those that stay
unknown are solved again with other search parameters and a longer limit. Source: ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from heapq import heapify, heappop, heappush
from math import ceil
from typing import Final

from pipeplan.ilp.cpsat.extract import fuse
from pipeplan.ilp.cpsat.period_search import (
    exact_scaling,
    minimize_period,
    solve_and_repair,
    upper_bound,
)
from pipeplan.ilp.cpsat.solve import SEARCH_SUBSOLVERS, PeriodResult, Status, solve_each
from pipeplan.ilp.cpsat.variables import Instance
from pipeplan.ilp.cycle_ratio import instant_ops, minimize_period_for_order
from pipeplan.ilp.exact.allocations import Assignment, lower_bound
from pipeplan.ilp.exact.branch_and_bound import QUICK_TURNS, decide, node_budget
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.schedule import Schedule
from pipeplan.units import ceil_div

FIRST_S: Final = 0.3
"""Seconds that a model has at first."""
LONGER: Final = 4
"""Factor by which those left open have more when every search has had its turn."""
SHORTEN_S: Final = 1.5
"""Seconds to shorten the period of an allocation that gave a plan."""


@dataclass(frozen=True, slots=True)
class Node:
    """One allocation of a chain: it needs a period per micro-batch of at least `lower_bound`."""

    lower_bound: Fraction
    home: Assignment
    """GPU of each layer."""
    state: Incumbent
    """Of the chain; takes the schedules that are found."""

    def instance(self, k: int) -> Instance:
        """Each layer on its GPU, `k` micro-batches per period."""
        items = tuple((layer, layer) for layer in range(len(self.home)))
        places = tuple((gpu,) for gpu in self.home)
        costs, most = self.state.costs, self.state.most_in_flight
        return exact_scaling(Instance(costs, items, places, k=k, most=most))


_QueuedNode = tuple[Fraction, Assignment, int, Node]
"""A node behind its key in the queue: its lower bound, then its GPUs, then its number."""


def nodes(
    state: Incumbent, homes: Sequence[Assignment], lowest: Fraction = Fraction(0)
) -> list[Node]:
    """Nodes of the allocations in which a micro-batch fits; none is shorter than `lowest`."""
    bounds = [(lower_bound(state.costs, home, state.most_in_flight), home) for home in homes]
    return [Node(max(bound, lowest), home, state) for bound, home in bounds if bound is not None]


@dataclass
class BestFirstEnumeration:
    """All allocations at one number of micro-batches per period.

    They may be of several chains that stand for the same one, each with a state of its own:
    `state` tells the time and what is proven of all.
    """

    state: Incumbent
    k: int
    unresolved: Fraction | None = field(default=None, init=False)
    """Least lower bound of the nodes found whose exact bytes or times do not fit; None if all
    do."""
    _high: int = field(default=0, init=False)
    """The longest period (ns of k micro-batches) that is still asked for."""
    _turn: int = 0
    """How often the unknown nodes were solved."""
    _reached: bool = False
    """Whether the gap asked for is."""

    def run(self, asked: Sequence[Node], seconds: float, high: int) -> bool:
        """Look for shorter plans until every allocation is decided or the time is over.

        Args:
            asked: All allocations in which a micro-batch fits.
            seconds: Time for it.
            high: Longest period that would be new, ns of k micro-batches.

        Returns:
            Whether nothing shorter is left for this k, as far as the models see.
        """
        state, self._high = self.state, high
        state.set_phase(f"enumeration: k={self.k}")
        left = list(asked)
        end = state.elapsed + seconds
        while left and not self._over(end):
            left = self._ask_all(left, end)
            self._turn += 1
        if self.k == 1:
            bounds = [node.lower_bound for node in left] + (
                [] if self.unresolved is None else [self.unresolved]
            )
            lowest = min(bounds, default=Fraction(self._high + 1))
            state.raise_bound("k1", min(Fraction(-(-lowest // 1)), Fraction(self._high + 1)))
        return not left

    def _over(self, end: float) -> bool:
        """Whether the time is, or nothing more is wanted: what decides nodes charges its work."""
        state = self.state
        return self._reached or state.closed or state.options.clock.spent >= end

    def _ask_all(self, asked: list[Node], end: float) -> list[Node]:
        """Ask each once more after its last success, by lower bounds; those that stay unknown."""
        queue = [(node.lower_bound, node.home, number, node) for number, node in enumerate(asked)]
        heapify(queue)
        left: list[Node] = []
        while queue and not self._over(end):
            batch = self._batch(queue, end)
            answers = self._answers([each[-1] for each in batch], end)
            for each, answer in zip(batch, answers, strict=True):
                if answer is Status.FEASIBLE:
                    heappush(queue, each)
                elif answer is Status.UNKNOWN:
                    left.append(each[-1])
        return [*left, *(node for *_, node in queue)]

    def _batch(self, queue: list[_QueuedNode], end: float) -> list[_QueuedNode]:
        """Take the least lower bounds, one for each worker; none if only higher ones are left.

        What orders settle is gone.
        """
        batch: list[_QueuedNode] = []
        while queue and len(batch) < self.state.options.workers and not self._over(end):
            if queue[0][0] * self.k > self._high:
                queue.clear()
            elif self._settled(queue[0][-1], end):
                heappop(queue)
            else:
                batch.append(heappop(queue))
        return batch

    def _settled(self, node: Node, end: float) -> bool:
        """Whether orders show that a node has no period shorter than the best, as it is then.

        After a success by bisection down to the lower bound: the schedule of an order that needs
        all its time for its bytes can be shortened ns by ns.
        """
        costs, clock = node.state.costs, self.state.options.clock
        shorter = partial(self._shorter, node)
        if self.k != 1:
            return False
        low, sure = ceil(node.lower_bound) - 1, True
        asked = self._high
        while low < self._high:
            if self._over(end):
                return False
            seconds = end - clock.spent
            told = decide(
                costs, node.home, asked, shorter, clock, node_budget(seconds, self._turn)
            )
            if told is not Status.FEASIBLE:
                low, sure = asked, told is Status.INFEASIBLE
            asked = (low + self._high + 1) // 2
        return sure

    def _shorter(self, node: Node, schedule: Schedule) -> bool:
        """Whether a schedule of orders, made as short as they allow, is the best now."""
        state, high = node.state, self._high
        lowest = state.lowest_period()
        fused = fuse(schedule, instant_ops(state.costs, schedule.stages))
        made = [schedule] if fused is None else [fused, schedule]
        made = [minimize_period_for_order(state.costs, each, lowest) for each in made]
        if not state.costs.cluster.action_overhead_ns:
            made.append(schedule)  # early starts may need bytes that these do not
        periods = [each.period for each in made if state.offer(each)]
        self._high = min([high, *(period - 1 for period in periods)])
        self._reached |= state.done
        return self._high < high

    def _answers(self, batch: list[Node], end: float) -> list[Status]:
        """Whether each allocation has a schedule of at most the longest period asked for.

        Orders are tried on all of them first.
        """
        turn = self._turn - (QUICK_TURNS if self.k == 1 else 0)
        if turn < 0:
            return [Status.UNKNOWN] * len(batch)
        instances = [node.instance(self.k) for node in batch]
        asked = [(each, ceil_div(self._high, each.tick)) for each in instances]
        lowest = self.state.lowest_period(self.k)
        limit = FIRST_S * LONGER ** (turn // len(SEARCH_SUBSOLVERS))
        limit = min(limit, max(0.1, end - self.state.options.clock.spent))
        high = self._high
        results = solve_each(asked, self.state.options, limit, lowest, turn)
        return [
            self._take(node, instance, result, high)
            for node, instance, result in zip(batch, instances, results, strict=True)
        ]

    def _take(self, node: Node, instance: Instance, result: PeriodResult, high: int) -> Status:
        """Offer what was found, making room where exact bytes do not fit; then shorten it.

        Durations round down to ticks, so what was found may last longer than `high`, the period
        asked for. At once it would come again: it waits for the next turn, unless every shorter
        period was decided.
        """
        if result.status is not Status.FEASIBLE:
            return result.status
        state = node.state
        taken = [each.period for each in result.schedules if state.offer(each)]
        if not taken:
            period = ceil_div(self._high, instance.tick)
            result = solve_and_repair(state, instance, period, FIRST_S)
            if result.status is not Status.FEASIBLE:
                return self._unresolved(node)
            taken = [each.period for each in result.schedules if state.is_feasible(each)]
        self._high = min([self._high, *(period - 1 for period in taken)])
        self._high = min(self._high, upper_bound(state, instance, tick=1))
        lowest = ceil_div(int(-(-node.lower_bound * self.k // 1)), instance.tick)
        seen = minimize_period(state, instance, SHORTEN_S, proof=False, lowest=lowest)
        self._high = min(self._high, upper_bound(state, instance, tick=1))
        self._reached |= state.done
        if self._high < high:
            return Status.FEASIBLE
        return Status.UNKNOWN if seen is Status.UNKNOWN else self._unresolved(node)

    def _unresolved(self, node: Node) -> Status:
        """It may be shorter than what is known: nothing above its lower bound is proven."""
        self.unresolved = (
            node.lower_bound if self.unresolved is None else min(self.unresolved, node.lower_bound)
        )
        return Status.MEMORY_OVERFLOW
