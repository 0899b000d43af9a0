"""Assignment annealing (`local_search.assignment_annealing`) that also decides on recomputation.

A step may also decide that a unit's layers are recomputed, each as a segment of its own: the
unit's load grows by its forward, and the unit keeps only its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.local_search.assignment_annealing import AssignmentAnnealing, over
from pipeplan.ilp.local_search.balancing import Estimate

FLIPS: Final = 0.4
"""Share of the steps that decide anew whether a unit is recomputed."""
RECOMPUTE_PRICE: Final = 0.02
"""Price of a period of forwards that are recomputed, in periods of load beyond the period."""


class RecomputeAssignmentAnnealing(AssignmentAnnealing):
    """An allocation and which units are recomputed, under improvement."""

    def __init__(
        self,
        costs: CostModel,
        single: CostModel,
        period: int,
        guess: Estimate,
        recomputed: Sequence[bool],
        price: float,
    ) -> None:
        """Add up an allocation.

        Args:
            costs: of the chain as it is.
            single: of the chain each of whose layers is a run.
            period: Nanoseconds per micro-batch.
            guess: where layers sit, what they keep, what else GPUs hold.
            recomputed: whether each layer is recomputed; units go by their first layer.
            price: of a cut, in periods of load beyond the period.
        """
        super().__init__(costs, period, guess.layout.homes, guess.counts, guess.beside, price)
        self._single = single
        # What each unit would add if it were decided the other way: swapped with what it adds.
        gpus = range(costs.gpus)
        self._longer = [[self._forward_of(unit, gpu) for gpu in gpus] for unit in self.units]
        self._other_work = [
            [one + other for one, other in zip(row, more, strict=True)]
            for row, more in zip(self._work, self._longer, strict=True)
        ]
        self._other_size = [
            [row[gpu] - self._freed(unit, gpu) for gpu in gpus]
            for unit, row in zip(self.units, self._size, strict=True)
        ]
        self._recomputed = [False] * len(self.units)
        for number, unit in enumerate(self.units):
            if recomputed[unit[0]]:
                self._flip(number)

    @property
    def recomputed(self) -> list[bool]:
        """Whether each layer is recomputed."""
        found = [False] * self._costs.layers
        for unit, flag in zip(self.units, self._recomputed, strict=True):
            for layer in unit:
                found[layer] = flag
        return found

    def _change(self, random: Random) -> Callable[[], None] | None:
        if random.random() >= FLIPS:
            return super()._change(random)
        unit = int(random.random() * len(self.units))
        self._flip(unit)
        return lambda: self._flip(unit)

    def _flip(self, unit: int) -> None:
        """Recompute a unit, or no longer."""
        gpu = self._homes[unit]
        self._recomputed[unit] = not self._recomputed[unit]
        for table, mine, other in (
            (self._loads, self._work, self._other_work),
            (self._bytes, self._size, self._other_size),
        ):
            old = table[gpu]
            table[gpu] = new = old + other[unit][gpu] - mine[unit][gpu]
            mine[unit], other[unit] = other[unit], mine[unit]
            self.total += over(new) - over(old)
        self.total += (
            RECOMPUTE_PRICE * self._longer[unit][0] * (1 if self._recomputed[unit] else -1)
        )

    def _forward_of(self, unit: tuple[int, ...], gpu: int) -> float:
        """Share of a period that the unit's forwards need on a GPU."""
        overhead = self._costs.cluster.action_overhead_ns
        work = sum(self._costs.forward_ns(layer, layer, gpu) - overhead for layer in unit)
        return work / self._period

    def _freed(self, unit: tuple[int, ...], gpu: int) -> float:
        """Share of a GPU's memory that is free when the unit keeps its layers' inputs alone."""
        total = 0.0
        for layer in unit:
            kept, light = (
                costs.segment(layer, layer, layer > 0).saved
                for costs in (self._costs, self._single)
            )
            total += self._counts[layer] * (kept - light)
        return total / max(1, self._costs.budgets[gpu])
