"""Simulated annealing of an assignment of layers to GPUs at one period, without times.

Without times a step costs a few additions: the load of each GPU and link, and the bytes of each
GPU if every layer kept a given number of micro-batches. Annealing (Kirkpatrick et al. 1983) drives
what exceeds the period and the memories to zero, with few cuts. How many micro-batches a layer
keeps is an estimate, which `balancing` corrects by schedules. The surrogate is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import exp
from random import Random
from typing import Final

from pipeplan.ilp.bounds.load import min_link_occupancy, must_share_groups
from pipeplan.ilp.costs import CostModel

TRIP: Final = 10
"""What the transfers of a cut add to its price, for each period they take."""
INITIAL_TEMPERATURE: Final = 0.02
"""Excess that a hot step accepts with probability 1/e."""
BUSY_CUTS: Final = 6
"""Links are looked at where so many of the longest cuts fill a period."""
SWAP: Final = 0.3
"""Share of the steps that also take a unit back."""
NEAR: Final = 0.6
"""Share of the steps that move a unit to the GPU of a neighbour."""


class AssignmentAnnealing:
    """An allocation of units, layers that must share a GPU at this period, under improvement.

    Attributes:
        homes: GPU of each layer.
        conflicting_pins: Whether layers of one unit are pinned to different GPUs: no plan is this
            short.
        total: What is beyond the period and the memories, as shares of them, and all cuts' prices.
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
        self._costs, self._period, self._counts = costs, period, counts
        cuts = min_link_occupancy(costs)
        self.units = must_share_groups(costs, cuts, period)
        gpus = range(costs.gpus)
        self._work = [[self._load_of(unit, gpu) for gpu in gpus] for unit in self.units]
        self._size = [[self._size_of(unit, gpu) for gpu in gpus] for unit in self.units]
        self._near, self._price = (
            self._neighbours(),
            [price * (1 + TRIP * cut / period) for cut in cuts],
        )
        self._links: dict[tuple[int, int], float] = {}
        self._busy: dict[tuple[int, int, int], float] = {}
        longest = sorted((cut for cut in cuts if cut <= period), reverse=True)[:BUSY_CUTS]
        self._watched = costs.gpus > 1 and sum(longest) > period
        self._loads, self._bytes = [0.0] * costs.gpus, list(beside)
        given = [{costs.pinned_gpus[layer] for layer in unit} - {None} for unit in self.units]
        self.conflicting_pins = any(len(gpus) > 1 for gpus in given)
        self._pinned = [bool(gpus) for gpus in given]
        self._homes = [
            next((gpu for gpu in gpus if gpu is not None), homes[unit[0]])
            for unit, gpus in zip(self.units, given, strict=True)
        ]
        self.total = 0.0
        self._add_up()

    @property
    def homes(self) -> tuple[int, ...]:
        """GPU of each layer."""
        homes = [0] * self._costs.layers
        for unit, gpu in zip(self.units, self._homes, strict=True):
            for layer in unit:
                homes[layer] = gpu
        return tuple(homes)

    @property
    def overload(self) -> float:
        """How far the fullest GPU or link is beyond the period, as a share of it."""
        return max(0.0, *(load - 1 for load in (*self._loads, *self._links.values())))

    @property
    def bytes(self) -> list[float]:
        """Estimated share of each GPU's memory that is taken."""
        return self._bytes

    def anneal(self, random: Random, steps: int) -> None:
        """Random changes from hot to cold."""
        for step in range(steps):
            before = self.total
            undo = self._change(random)
            worse = self.total - before
            heat = INITIAL_TEMPERATURE * (1 - step / steps) + 1e-9
            if undo and worse > 0 and random.random() >= exp(-worse / heat):
                undo()
                self.total = before

    def _change(self, random: Random) -> Callable[[], None] | None:
        """Move a unit, perhaps another one back; how to undo that, or None if nothing is done."""
        count, homes = len(self.units), self._homes
        unit, draw = int(random.random() * count), random.random()
        here = homes[unit]
        if draw < NEAR and self._near[unit]:
            there = homes[random.choice(self._near[unit])[1]]
        else:
            there = int(random.random() * self._costs.gpus)
        if there == here or self._pinned[unit]:
            return None
        self._move(unit, there)
        back = int(random.random() * count) if random.random() < SWAP else unit
        swapped = back != unit and homes[back] == there and not self._pinned[back]
        if swapped:
            self._move(back, here)

        def undo() -> None:
            self._move(unit, here)
            if swapped:
                self._move(back, there)

        return undo

    def _add_up(self) -> None:
        """Loads, bytes, links and the total from scratch."""
        for unit, gpu in enumerate(self._homes):
            self._loads[gpu] += self._work[unit][gpu]
            self._bytes[gpu] += self._size[unit][gpu]
        self.total = sum(map(over, self._loads)) + sum(map(over, self._bytes))
        for unit, near in enumerate(self._near):
            for boundary, other in near:
                if unit < other and self._homes[unit] != self._homes[other]:
                    self._cross(boundary, self._homes[unit], self._homes[other], 1)

    def _move(self, unit: int, there: int) -> None:
        homes = self._homes
        here = homes[unit]
        for table, sizes in ((self._loads, self._work[unit]), (self._bytes, self._size[unit])):
            old, new = table[here], table[there]
            table[here] = left = old - sizes[here]
            table[there] = grown = new + sizes[there]
            self.total += over(left) - over(old) + over(grown) - over(new)
        for boundary, other in self._near[unit]:
            home = homes[other]
            if home != here:
                self._cross(boundary, here, home, -1)
            if home != there:
                self._cross(boundary, there, home, 1)
        homes[unit] = there

    def _cross(self, boundary: int, one: int, other: int, sign: int) -> None:
        """Count a cut between two GPUs (sign 1), or no longer (-1)."""
        self.total += sign * self._price[boundary]
        if self._watched:
            key = (one, other) if one < other else (other, one)
            old = self._links.get(key, 0.0)
            new = self._links[key] = old + sign * self._share(boundary, *key)
            self.total += over(new) - over(old)

    def _share(self, boundary: int, one: int, other: int) -> float:
        """Share of a period for which a cut keeps the link of two GPUs busy."""
        key = boundary, one, other
        if key not in self._busy:
            costs = self._costs
            ways = (
                costs.send_forward_ns(boundary, one, other),
                costs.send_backward_ns(boundary, other, one),
            )
            half = costs.cluster.links.duplex == "half"
            self._busy[key] = (sum(ways) if half else max(ways)) / self._period
        return self._busy[key]

    def _load_of(self, unit: tuple[int, ...], gpu: int) -> float:
        """Share of a period that the unit's layers need on a GPU."""
        overhead = 2 * self._costs.cluster.action_overhead_ns
        work = sum(self._costs.load_ns(layer, layer, gpu) - overhead for layer in unit)
        return (work + overhead) / self._period

    def _size_of(self, unit: tuple[int, ...], gpu: int) -> float:
        """Share of a GPU's memory that the unit's layers need, states and what they keep."""
        total = 0.0
        for layer in unit:
            size = self._costs.segment(layer, layer, layer > 0)
            total += size.states + self._counts[layer] * size.saved
        return total / max(1, self._costs.budgets[gpu])

    def _neighbours(self) -> list[list[tuple[int, int]]]:
        """Of each unit: (boundary, unit beyond it)."""
        owner = {layer: n for n, unit in enumerate(self.units) for layer in unit}
        near: list[list[tuple[int, int]]] = [[] for _ in self.units]
        for boundary in range(self._costs.layers - 1):
            one, other = owner[boundary], owner[boundary + 1]
            if one != other:
                near[one].append((boundary, other))
                near[other].append((boundary, one))
        return near


def over(share: float) -> float:
    """What exceeds the whole, but for the rounding of sums."""
    return share - 1 if share > 1 + 1e-9 else 0.0
