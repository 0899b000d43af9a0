"""Assignment annealing (`local_search.assignment_annealing`) that also decides on recomputation.

A step may also decide anew how a unit runs: its layers keep all, are recomputed, each as a segment
of its own, or run under one of their options: the unit's load grows by what runs again, and the
unit keeps less.
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


KEPT, RECOMPUTED, OPTIONS = 0, 1, 2
"""How a layer runs; from `OPTIONS` on under an option."""


class RecomputeAssignmentAnnealing(AssignmentAnnealing):
    """An allocation and how units run, under improvement."""

    def __init__(
        self,
        costs: CostModel,
        variants: Sequence[CostModel],
        period: int,
        guess: Estimate,
        chosen: Sequence[int],
        price: float,
    ) -> None:
        """Add up an allocation.

        Args:
            costs: of the chain as it is.
            variants: of the chain each of whose layers is a run; of those in which layers run
                under their first option, their second, ..
            period: Nanoseconds per micro-batch.
            guess: where layers sit, what they keep, what else GPUs hold.
            chosen: how each layer runs; units go by their first layer.
            price: of a cut, in periods of load beyond the period.
        """
        super().__init__(costs, period, guess.layout.homes, guess.counts, guess.beside, price)
        self._variants = variants
        gpus = range(costs.gpus)
        # By unit, way to run and GPU: shares of a period, shares of a GPU's memory.
        self._work_by, self._size_by = (
            [[row] for row in rows] for rows in (self._work, self._size)
        )
        for number, unit in enumerate(self.units):
            work, size = self._work[number], self._size[number]
            for way in self._ways(unit):
                self._work_by[number].append([work[g] + self._longer(unit, way, g) for g in gpus])
                self._size_by[number].append([size[g] - self._freed(unit, way, g) for g in gpus])
        self._chosen = [KEPT] * len(self.units)
        for number, unit in enumerate(self.units):
            if way := min(chosen[unit[0]], len(self._work_by[number]) - 1):
                self._set(number, way)

    def _ways(self, unit: tuple[int, ...]) -> range:
        """How a unit may run but keep all; several layers have no options in common."""
        options = len(self._costs.chain.layers[unit[0]].options) if len(unit) == 1 else 0
        return range(RECOMPUTED, OPTIONS + options)

    @property
    def chosen(self) -> list[int]:
        """How each layer runs."""
        found = [KEPT] * self._costs.layers
        for unit, way in zip(self.units, self._chosen, strict=True):
            for layer in unit:
                found[layer] = way
        return found

    def _change(self, random: Random) -> Callable[[], None] | None:
        if random.random() >= FLIPS:
            return super()._change(random)
        unit = int(random.random() * len(self.units))
        before, ways = self._chosen[unit], len(self._work_by[unit])
        further = 1 if ways == OPTIONS else 1 + int(random.random() * (ways - 1))
        self._set(unit, (before + further) % ways)
        return lambda: self._set(unit, before)

    def _set(self, unit: int, way: int) -> None:
        """Run a unit in another way."""
        gpu, longer = self._homes[unit], self._work_by[unit][way][0] - self._work[unit][0]
        self._chosen[unit] = way
        for table, mine, ways in (
            (self._loads, self._work, self._work_by[unit]),
            (self._bytes, self._size, self._size_by[unit]),
        ):
            old = table[gpu]
            table[gpu] = new = old + ways[way][gpu] - mine[unit][gpu]
            mine[unit] = ways[way]
            self.total += over(new) - over(old)
        self.total += RECOMPUTE_PRICE * longer

    def _longer(self, unit: tuple[int, ...], way: int, gpu: int) -> float:
        """Share of a period that the unit needs more on a GPU."""
        own, other = self._costs, self._variants[way - 1]
        if way == RECOMPUTED:
            overhead = own.cluster.action_overhead_ns
            work = sum(own.forward_ns(layer, layer, gpu) - overhead for layer in unit)
        else:
            work = sum(
                other.load_ns(layer, layer, gpu) - own.load_ns(layer, layer, gpu) for layer in unit
            )
        return work / self._period

    def _freed(self, unit: tuple[int, ...], way: int, gpu: int) -> float:
        """Share of a GPU's memory that is free when the unit runs so."""
        total = 0.0
        for layer in unit:
            kept, light = (
                costs.segment(layer, layer, layer > 0).saved
                for costs in (self._costs, self._variants[way - 1])
            )
            total += self._counts[layer] * (kept - light)
        return total / max(1, self._costs.budgets[gpu])
