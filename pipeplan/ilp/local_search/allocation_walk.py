"""Annealing over allocations, many steps at a time.

An allocation becomes arrays (`allocation_steps`) and is one again where Python looks at it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from pipeplan.cluster import Host
from pipeplan.ilp.compiled import Floats, Ints, with_attributes
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.local_search.allocation import Allocation
from pipeplan.ilp.local_search.allocation_moves import DRAWS, RUN_DRAWS, keep, make_step
from pipeplan.ilp.local_search.allocation_stages import LayoutArrays
from pipeplan.ilp.local_search.allocation_steps import walk
from pipeplan.ilp.local_search.chain_arrays import chain_arrays
from pipeplan.ilp.local_search.layer_ways import (
    ENDS,
    KEPT,
    NO_WAYS,
    OPTION,
    OPTIONS,
    RUN,
    piece_end,
    way_arrays,
)
from pipeplan.ilp.local_search.run_moves import fill
from pipeplan.ilp.modulo_scheduling import STAGE
from pipeplan.ilp.offload.relief_estimate import link_of
from pipeplan.ilp.runs import Run

ENOUGH: Final = 2000
"""Copies of stages that are placed in one go: some ms, where there are few of them."""


class AllocationWalk:
    """One walk from allocation to allocation, at one period."""

    def __init__(
        self,
        costs: CostModel,
        random: np.random.Generator,
        *,
        recompute: bool = False,
        host: Host | None = None,
    ) -> None:
        """Nowhere yet: `begin` says where.

        Args:
            costs: of the chain as it is.
            random: what steps draw from.
            recompute: whether steps may change what is computed again.
            host: where activations may leave to, as far as estimated.
        """
        self._random, self._recompute = random, recompute
        self._draws = RUN_DRAWS if recompute else DRAWS
        ways = way_arrays(costs) if recompute else NO_WAYS
        link = link_of(host) if host else np.zeros(0)
        stages = with_attributes(np.zeros(costs.layers, STAGE))
        self._known = chain_arrays(costs), ways, link, stages

    def begin(self, layout: Allocation, excess: float, period: int) -> None:
        """Go on from an allocation.

        Args:
            layout: Where.
            excess: How far it is from a plan, as a share of a GPU's memory.
            period: Of all copies, in ns.
        """
        self._at, self._new, self._closest = (
            arrays_of(layout, recompute=self._recompute) for _ in range(3)
        )
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
        draws = self._random.random((len(heats), self._draws))
        waiting = self._pending is not None
        if self._pending is not None:
            draws[0] = self._pending
        places = (self._at, self._new, self._closest)
        done, placed, found = walk(
            *(*self._known, *places, self._excesses, self._period),
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
    arrays = arrays_of(replace(layout, recompute=()))
    make_step(arrays, chain_arrays(costs), NO_WAYS[ENDS][OPTIONS], random.random(DRAWS))
    return replace(allocation_of(arrays), recompute=layout.recompute)


def kept(costs: CostModel, layout: Allocation, draw: float) -> Allocation:
    """The layout with tied layers where one of theirs is, pinned ones on their GPUs."""
    homes = np.array(layout.homes)
    keep(homes, chain_arrays(costs), draw)
    return replace(layout, homes=tuple(homes.tolist()))


def arrays_of(layout: Allocation, *, recompute: bool = False) -> LayoutArrays:
    """An allocation in arrays, which have no runs in runs.

    Args:
        layout: the allocation.
        recompute: whether it may compute layers again.
    """
    layers = len(layout.homes)
    cuts, waits = np.zeros(layers, np.int64), np.zeros((layers, 2))
    cuts[list(layout.splits)] = 1
    for first, wait in layout.waits.items():
        waits[first] = wait
    ways = np.zeros(layers if recompute else 0, np.int64)
    for run in layout.recompute:
        assert not run.inner
        fill(ways, run.first, run.last + 1, RUN if run.option is None else OPTION + run.option)
    return np.array(layout.homes), cuts, waits, np.array(layout.turns), ways


def allocation_of(arrays: LayoutArrays) -> Allocation:
    """The allocation that arrays describe."""
    homes, cuts, waits, turns, ways = arrays
    return Allocation(
        homes=tuple(homes.tolist()),
        splits=frozenset(np.flatnonzero(cuts).tolist()),
        turns=tuple(turns.tolist()),
        recompute=tuple(_runs(ways)),
        waits={
            first: tuple(waits[first].tolist())
            for first in np.flatnonzero(waits.any(axis=1)).tolist()
        },
    )


def _runs(ways: Ints) -> Iterator[Run]:
    layer = 0
    while layer < len(ways):
        way, end = int(ways[layer]), piece_end(ways, layer, len(ways))
        if way != KEPT:
            yield Run(layer, end - 1, way - OPTION if way >= OPTION else None)
        layer = end
