"""Assignment annealing (`local_search.assignment_annealing`) that also decides on recomputation.

A step may also decide anew how a unit runs: its layers keep all, are recomputed, each as a segment
of its own, or run under one of their options: the unit's load grows by what runs again, and the
unit keeps less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.local_search.assignment_annealing import AssignmentAnnealing, layer_rows
from pipeplan.ilp.local_search.assignment_steps import Ways
from pipeplan.ilp.local_search.balancing import Estimate

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
        self._variants, self._given = variants, chosen
        super().__init__(costs, period, guess.layout.homes, guess.counts, guess.beside, price)

    @property
    def chosen(self) -> list[int]:
        """How each layer runs."""
        return self._by_layer(self._chosen)

    def _all_ways(self) -> Ways:
        kept = layer_rows(self._costs)
        work, size = [self._work_of(kept.load)], [self._size_of(kept)]
        for way, variant in enumerate(self._variants, RECOMPUTED):
            rows = layer_rows(variant)
            again = kept.load + kept.forward if way == RECOMPUTED else rows.load
            work.append(self._work_of(again))
            size.append(self._size_of(kept._replace(saved=rows.saved)))
        longer = np.stack([each[:, 0] - work[0][:, 0] for each in work], axis=1)
        return (
            np.stack(work, axis=1),
            np.stack(size, axis=1),
            RECOMPUTE_PRICE * longer,
            np.array([self._number(unit) for unit in self.units]),
        )

    def _begin(self) -> list[int]:
        return [min(self._given[unit[0]], self._number(unit) - 1) for unit in self.units]

    def _number(self, unit: tuple[int, ...]) -> int:
        """Ways of a unit to run; several layers have no options in common."""
        options = len(self._costs.chain.layers[unit[0]].options) if len(unit) == 1 else 0
        return OPTIONS + options
