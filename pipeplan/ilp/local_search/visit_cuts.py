"""Where a chain changes GPUs, if it comes to them in a given order: cuts are annealed.

Loads, and bytes as they would be if each micro-batch stayed as long as its work and transfers
take, are to fit a period. One step takes a microsecond or two.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, pairwise
from math import exp
from typing import Final

import numpy as np

from pipeplan.ilp.compiled import Floats, Ints, compiled
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.local_search.chain_arrays import (
    BACKWARD,
    BUDGETS,
    FORWARD,
    RETURNING,
    RUNNING,
    SAVED,
    SIZES,
    STATES,
    ChainArrays,
    chain_arrays,
    op_ns,
    send_ns,
)

BETWEEN: Final = 0.3
"""Micro-batches more than on average that a stage has when its GPU is fullest."""
OVERLOAD: Final = 3.0
"""Weight of load beyond the period against bytes beyond the memory."""
TEMPERATURE: Final = 0.05
"""Excess that a hot change accepts with probability 1/e."""
COLD: Final = 1e-9
"""Added to every temperature: the last ones are next to nothing."""
MOVES: Final = (-3, -2, -1, -1, -1, 1, 1, 1, 2, 3)
"""Layers by which cuts move."""
ALONE: Final = 0.4
"""Share of the changes that move one cut; the others move several next to each other."""
DRAWS: Final = 5
"""Random numbers that a change takes."""


class VisitCuts:
    """Where the chain changes GPUs, if it comes to them in a given order.

    Attributes:
        starts: First layer of each visit, rising from 0; a visit without layers starts where the
            next one does.
        excess: Load beyond the period and estimated bytes beyond the memories, as shares of them.
    """

    def __init__(
        self, costs: CostModel, order: Sequence[int], period: int, stretch: float
    ) -> None:
        """Begin with visits of equal work.

        Args:
            costs: Durations and bytes.
            order: GPU of each visit.
            period: Nanoseconds per micro-batch.
            stretch: How many times longer than its work a micro-batch stays behind a layer.
        """
        self._order, self._layers = np.array(order), costs.layers
        self._known = chain_arrays(costs), self._order, period, stretch
        self._starts = np.array(_even(costs, len(order)))
        self.excess = float(_excess(*self._known, self._starts))

    @property
    def starts(self) -> list[int]:
        """First layers of the visits."""
        return list(map(int, self._starts))

    @property
    def homes(self) -> tuple[int, ...]:
        """GPU of each layer."""
        visits = zip(self._order.tolist(), pairwise([*self.starts, self._layers]), strict=True)
        return tuple(chain.from_iterable([gpu] * (end - first) for gpu, (first, end) in visits))

    def anneal(self, random: np.random.Generator, steps: int) -> None:
        """Random changes from hot to cold, until everything fits."""
        draws = random.random((steps, DRAWS))
        self.excess = float(_anneal(*self._known, self._starts, draws))


def _even(costs: CostModel, visits: int) -> list[int]:
    """First layers of so many parts of about equal work."""
    total = costs.load_ns(0, costs.layers - 1, 0)
    starts, layer = [0], 0
    for visit in range(1, visits):
        while layer < costs.layers and costs.load_ns(0, layer, 0) * visits <= total * visit:
            layer += 1
        starts.append(layer)
    return starts


@compiled
def _anneal(
    chain: ChainArrays, order: Ints, period: int, stretch: float, starts: Ints, draws: Floats
) -> float:
    """Move cuts, `starts`, until there is no excess or the random numbers are used; the excess."""
    excess = _excess(chain, order, period, stretch, starts)
    changed = starts.copy()
    for step in range(len(draws)):
        if excess <= 0:
            break
        changed[:] = starts
        _move(changed, chain[SIZES].shape[1], draws[step])
        found = _excess(chain, order, period, stretch, changed)
        heat = TEMPERATURE * (1 - step / len(draws)) + COLD
        if found <= excess or draws[step, -1] < exp((excess - found) / heat):
            starts[:] = changed
            excess = found
    return excess


@compiled
def _move(starts: Ints, layers: int, draws: Floats) -> None:
    """Move one cut or several by the same number of layers; what is in the way gives way."""
    count, move = len(starts), MOVES[int(draws[0] * len(MOVES))]
    first = 1 + int(draws[1] * (count - 1))
    last = first if draws[2] < ALONE else first + int(draws[3] * (count - first))
    for index in range(first, last + 1):
        starts[index] = min(max(starts[index] + move, 0), layers)
    for index in range(first - 1, 0, -1):
        starts[index] = min(starts[index], starts[index + 1])
    for index in range(first + 1, count):
        starts[index] = max(starts[index], starts[index - 1])


@compiled
def _excess(chain: ChainArrays, order: Ints, period: int, stretch: float, starts: Ints) -> float:
    """Sums from the end of the chain: a stage keeps what its work and all behind it take."""
    sizes, budgets = chain[SIZES], chain[BUDGETS]
    loads, held, working = (np.zeros(len(budgets)), np.zeros(len(budgets)), np.zeros(len(budgets)))
    stay, behind, end = 0, -1, sizes.shape[1]
    for visit in range(len(order) - 1, -1, -1):
        gpu, first, last = order[visit], starts[visit], end - 1
        if first > last:
            continue
        load = op_ns(chain, FORWARD, first, end, gpu) + op_ns(chain, BACKWARD, first, end, gpu)
        stay += load
        if behind >= 0 and behind != gpu:
            stay += send_ns(chain, FORWARD, last, gpu, behind)
            stay += send_ns(chain, BACKWARD, last, behind, gpu)
        loads[gpu] += load
        saved = sizes[SAVED, first, last]
        held[gpu] += sizes[STATES, first, last] + saved * (stay * stretch / period + BETWEEN)
        more = max(sizes[RETURNING, first, last], sizes[RUNNING, first, last] - saved)
        working[gpu] = max(working[gpu], more)
        behind, end = gpu, first
    total = 0.0
    for gpu in range(len(budgets)):
        total += OVERLOAD * max(0.0, loads[gpu] / period - 1)
        total += max(0.0, (held[gpu] + working[gpu]) / max(1, budgets[gpu]) - 1)
    return total
