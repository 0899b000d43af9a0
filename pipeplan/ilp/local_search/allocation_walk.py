"""Annealing over allocations, many steps at a time.

An allocation becomes arrays (`allocation_steps`) and is one again where Python looks at it.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from pipeplan.ilp.compiled import Floats, Ints, with_attributes
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.local_search.allocation import Allocation
from pipeplan.ilp.local_search.allocation_moves import DRAWS, keep, make_step
from pipeplan.ilp.local_search.allocation_steps import walk
from pipeplan.ilp.local_search.chain_arrays import chain_arrays
from pipeplan.ilp.modulo_scheduling import STAGE

Arrays = tuple[Ints, Ints, Floats, Floats]
"""An allocation, as `allocation_steps` has it."""
ENOUGH: Final = 2000
"""Copies of stages that are placed in one go: some ms, where there are few of them."""


class AllocationWalk:
    """One walk from allocation to allocation, at one period."""

    def __init__(self, costs: CostModel, random: np.random.Generator) -> None:
        """Nowhere yet: `begin` says where."""
        self._chain, self._random = chain_arrays(costs), random
        self._stages = with_attributes(np.zeros(costs.layers, STAGE))

    def begin(self, layout: Allocation, excess: float, period: int) -> None:
        """Go on from an allocation.

        Args:
            layout: Where.
            excess: How far it is from a plan, as a share of a GPU's memory.
            period: Of all copies, in ns.
        """
        self._at, self._new, self._closest = (arrays_of(layout) for _ in range(3))
        self._excesses, self._period = np.full(3, excess), period
        self._pending: Floats | None = None
        """Random numbers of a step that is made and waits for its judgement."""

    def run(self, heats: Floats) -> tuple[int, int]:
        """Make a step for each temperature, until one comes to what fits by the estimate.

        A run ends earlier where steps take long: `waits` tells one end from the other.

        Args:
            heats: Excess that the step accepts with probability 1/e.

        Returns:
            How many steps are done, how many copies of stages were placed.
        """
        draws = self._random.random((len(heats), DRAWS))
        waiting = self._pending is not None
        if self._pending is not None:
            draws[0] = self._pending
        places = (self._at, self._new, self._closest)
        done, placed, found = walk(
            *(self._chain, self._stages, *places, self._excesses, self._period),
            *(draws, heats, waiting, ENOUGH),
        )
        self._pending = draws[done] if found else None
        return done, placed

    @property
    def waits(self) -> bool:
        """Whether one more step came to `new` and waits until it is `judged`."""
        return self._pending is not None

    def judged(self, excess: float) -> None:
        """The allocation `new` is so far from a plan."""
        self._excesses[1] = excess

    @property
    def new(self) -> Allocation:
        """What the last step came to."""
        return allocation_of(self._new)

    @property
    def closest(self) -> tuple[float, Allocation]:
        """The least excess since the beginning, and the allocation that has it."""
        return float(self._excesses[2]), allocation_of(self._closest)


def stepped(costs: CostModel, layout: Allocation, random: np.random.Generator) -> Allocation:
    """What one random step makes of an allocation; what it recomputes stays."""
    arrays = arrays_of(layout)
    make_step(arrays, chain_arrays(costs), random.random(DRAWS))
    return allocation_of(arrays, layout)


def kept(costs: CostModel, layout: Allocation, draw: float) -> Allocation:
    """The layout with tied layers where one of theirs is, pinned ones on their GPUs."""
    arrays = arrays_of(layout)
    keep(arrays[0], chain_arrays(costs), draw)
    return allocation_of(arrays, layout)


def arrays_of(layout: Allocation) -> Arrays:
    """An allocation in arrays, without what it recomputes."""
    layers = len(layout.homes)
    cuts, waits = np.zeros(layers, np.int64), np.zeros((layers, 2))
    cuts[list(layout.splits)] = 1
    for first, wait in layout.waits.items():
        waits[first] = wait
    return np.array(layout.homes), cuts, waits, np.array(layout.turns)


def allocation_of(arrays: Arrays, like: Allocation | None = None) -> Allocation:
    """The allocation that arrays describe; it recomputes what `like` does."""
    homes, cuts, waits, turns = arrays
    return Allocation(
        homes=tuple(homes.tolist()),
        splits=frozenset(np.flatnonzero(cuts).tolist()),
        turns=tuple(turns.tolist()),
        recompute=like.recompute if like else (),
        waits={
            first: tuple(waits[first].tolist())
            for first in np.flatnonzero(waits.any(axis=1)).tolist()
        },
    )
