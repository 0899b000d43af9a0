"""Simulated annealing of an assignment of layers to GPUs at one period, without times.

Without times a step costs a few additions: the load of each GPU and link, and the bytes of each
GPU if every layer kept a given number of micro-batches. Annealing (Kirkpatrick et al. 1983) drives
what exceeds the period and the memories to zero, with few cuts. How many micro-batches a layer
keeps is an estimate, which `balancing` corrects by schedules. The surrogate is ours.

Units, layers that must share a GPU, may run in several ways, of which `recompute` makes use: with
other loads and bytes. Steps are machine code.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations
from random import Random
from typing import Final, NamedTuple

import numpy as np

from pipeplan.ilp.bounds.load import min_link_occupancy, must_share_groups
from pipeplan.ilp.compiled import Floats, Ints
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.local_search.assignment_steps import (
    DRAWS,
    Links,
    Neighbours,
    Ways,
    add_up,
    anneal,
)

TRIP: Final = 10
"""What the transfers of a cut add to its price, for each period they take."""
BUSY_CUTS: Final = 6
"""Links are looked at where so many of the longest cuts fill a period."""
AT_ONCE: Final = 50_000
"""Steps whose random numbers are drawn at once."""


class LayerRows(NamedTuple):
    """Of each layer by itself: ns of F and of F and B by GPU, without overhead; bytes."""

    forward: Floats
    load: Floats
    states: Floats
    saved: Floats


class AssignmentAnnealing:
    """An allocation of units, layers that must share a GPU at this period, under improvement.

    Attributes:
        conflicting_pins: Whether layers of one unit are pinned to different GPUs: no plan is this
            short.
        total: What is beyond the period and the memories, as shares of them, and all prices.
    """

    def __init__(
        self,
        costs: CostModel,
        period: int,
        homes: Sequence[int],
        counts: Sequence[float],
        beside: Sequence[float],
        price: float,
    ) -> None:
        """Add up an allocation.

        Args:
            costs: Durations and bytes.
            period: Nanoseconds per micro-batch.
            homes: GPU of each layer; units go where a layer of them is pinned, else where their
                first layer sits.
            counts: Micro-batches that each layer keeps on average.
            beside: Share of each GPU's memory that is taken by anything else.
            price: Of a cut, in periods of load beyond the period.
        """
        self._costs, self._period, self._counts = costs, period, np.array(counts)
        cuts = min_link_occupancy(costs)
        self.units = must_share_groups(costs, cuts, period)
        given = [{costs.pinned_gpus[layer] for layer in unit} - {None} for unit in self.units]
        self.conflicting_pins = any(len(gpus) > 1 for gpus in given)
        self._pinned = np.array([bool(gpus) for gpus in given])
        self._ways, self._links = self._all_ways(), self._link_rows(cuts)
        self._near = self._neighbours([price * (1 + TRIP * cut / period) for cut in cuts])
        begin = [
            next((gpu for gpu in gpus if gpu is not None), homes[unit[0]])
            for unit, gpus in zip(self.units, given, strict=True)
        ]
        self._homes, self._chosen = np.array(begin), np.array(self._begin())
        self._loads, self._held = np.zeros(costs.gpus), np.array(beside, np.float64)
        self._used = np.zeros((costs.gpus, costs.gpus))
        self._at = self._homes, self._chosen, self._loads, self._held, self._used
        self.total = float(add_up(self._ways, self._near, self._links, self._at))

    @property
    def homes(self) -> tuple[int, ...]:
        """GPU of each layer."""
        return tuple(self._by_layer(self._homes))

    @property
    def overload(self) -> float:
        """How far the fullest GPU or link is beyond the period, as a share of it."""
        return max(0.0, float(self._loads.max() - 1), float(self._used.max() - 1))

    @property
    def bytes(self) -> list[float]:
        """Estimated share of each GPU's memory that is taken."""
        found: list[float] = self._held.tolist()
        return found

    def anneal(self, random: Random, steps: int) -> None:
        """Random changes from hot to cold."""
        draws = np.random.default_rng(random.getrandbits(64))
        for done in range(0, steps, AT_ONCE):
            some = draws.random((min(AT_ONCE, steps - done), DRAWS))
            known = self._ways, self._near, self._links, self._pinned
            self.total = float(anneal(*known, self._at, some, done, steps, self.total))

    def _all_ways(self) -> Ways:
        """There is one way to run."""
        rows = layer_rows(self._costs)
        work, size = self._work_of(rows.load), self._size_of(rows)
        return (
            work[:, None],
            size[:, None],
            np.zeros((len(self.units), 1)),
            np.ones(len(self.units), np.int64),
        )

    def _begin(self) -> list[int]:
        """How each unit runs at first."""
        return [0] * len(self.units)

    def _work_of(self, load: Floats) -> Floats:
        """By unit and GPU: share of a period that its layers need, with one stage's overhead."""
        overhead = 2 * self._costs.cluster.action_overhead_ns
        return (self._by_unit(load) + overhead) / self._period

    def _size_of(self, rows: LayerRows) -> Floats:
        """By unit and GPU: share of its memory that states take and what layers keep."""
        kept = self._by_unit(rows.states + self._counts * rows.saved)
        return kept[:, None] / np.maximum(1, np.array(self._costs.budgets, np.float64))

    def _by_unit(self, rows: Floats) -> Floats:
        """Sums over the layers of each unit."""
        return np.array([rows[list(unit)].sum(axis=0) for unit in self.units])

    def _by_layer(self, rows: Ints) -> list[int]:
        """What is said of its unit, for each layer."""
        found = [0] * self._costs.layers
        for unit, value in zip(self.units, rows.tolist(), strict=True):
            for layer in unit:
                found[layer] = value
        return found

    def _link_rows(self, cuts: Sequence[int]) -> Links:
        """Links are of one class if they are equal in both directions."""
        costs, numbers, ends = self._costs, dict[object, int](), list[tuple[int, int]]()
        longest = sorted((cut for cut in cuts if cut <= self._period), reverse=True)[:BUSY_CUTS]
        classes = np.zeros((costs.gpus, costs.gpus), np.int64)
        if costs.gpus == 1 or sum(longest) <= self._period:
            return np.empty((0, 0)), classes
        for one, other in combinations(range(costs.gpus), 2):
            ways = costs.link(one, other), costs.link(other, one)
            number = classes[one, other] = numbers.setdefault(ways, len(numbers))
            if number == len(ends):
                ends.append((one, other))
        half = costs.cluster.links.duplex == "half"
        busy = np.empty((len(cuts), len(ends)))
        for boundary in range(len(cuts)):
            for number, (one, other) in enumerate(ends):
                both = (
                    costs.send_forward_ns(boundary, one, other),
                    costs.send_backward_ns(boundary, other, one),
                )
                busy[boundary, number] = (sum(both) if half else max(both)) / self._period
        return busy, classes

    def _neighbours(self, prices: Sequence[float]) -> Neighbours:
        owner = {layer: n for n, unit in enumerate(self.units) for layer in unit}
        near: list[list[tuple[int, int]]] = [[] for _ in self.units]
        for boundary in range(self._costs.layers - 1):
            one, other = owner[boundary], owner[boundary + 1]
            if one != other:
                near[one].append((boundary, other))
                near[other].append((boundary, one))
        first = np.cumsum([0, *map(len, near)])
        pairs = np.array([pair for row in near for pair in row], np.int64).reshape(-1, 2)
        return first, pairs[:, 0].copy(), pairs[:, 1].copy(), np.array(prices)


@lru_cache(maxsize=64)
def layer_rows(costs: CostModel) -> LayerRows:
    """Of each layer of a chain."""
    speeds = [costs.compute_sums(gpu) for gpu in range(costs.gpus)]
    forward = np.array([np.diff(np.array(sums)) for sums, _ in speeds], np.float64).T
    backward = np.array([np.diff(np.array(sums)) for _, sums in speeds], np.float64).T
    sizes = [costs.segment(layer, layer, layer > 0) for layer in range(costs.layers)]
    return LayerRows(
        forward=forward,
        load=forward + backward,
        states=np.array([size.states for size in sizes], np.float64),
        saved=np.array([size.saved for size in sizes], np.float64),
    )
