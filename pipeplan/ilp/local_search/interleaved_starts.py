"""Starts for annealing with looped (interleaved) and V-shaped placement of stages.

In a contiguous plan the first GPU keeps as many micro-batches as there are GPUs, the last one
keeps one. If the chain, once through all GPUs, goes on with some of them in the same order
(looped: Narayanan et al. 2021) or backwards (V-shaped: Qi et al. 2024), those GPUs hold a few
early layers of many micro-batches and late ones of few, so that all memories fill alike. Cuts are
annealed until loads and estimated bytes fit a period below the best plan's; `annealing` goes on
from there, and once more from those that end close to a plan (`elite_set`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from itertools import chain, pairwise
from math import exp, inf
from random import Random
from typing import Final

from pipeplan.ilp.contiguous.unconstrained import is_memory_bound
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.local_search.allocation import Allocation
from pipeplan.ilp.local_search.annealing import INITIAL_TEMPERATURE, SimulatedAnnealing
from pipeplan.ilp.local_search.elite_set import EliteSet, Start

FAR: Final = Fraction(103, 100)
"""Starts are tried where the best plan is so many times longer than the bound."""
TARGET_REDUCTIONS: Final = (0.02, 0.05, 0.1, 0.2)
"""By how much a start tries to shorten the best plan's period."""
ONCE: Final = 0.8
"""Share of the starts whose chain comes to each GPU at most twice."""
MOST_PASSES: Final = 4
"""Times that the other starts come to each GPU at most."""
STRETCHES: Final = (1.0, 1.1, 1.2)
"""How many times longer than its work a micro-batch is taken to stay, for it has to wait."""
BETWEEN: Final = 0.3
"""Micro-batches more than on average that a stage has when its GPU is fullest."""
OVERLOAD: Final = 3.0
"""Weight of load beyond the period against bytes beyond the memory."""
STEPS: Final = (150, 500)
"""Changes of borders before annealing begins: few give more starts and more different ones, many
are for long chains of unlike layers."""
STEP_S: Final = 5e-5
"""What such a change counts for where work is counted instead of time."""
BORDER_TEMPERATURE: Final = 0.05
"""Excess that a hot change accepts with probability 1/e."""
MOVES: Final = (-3, -2, -1, -1, -1, 1, 1, 1, 2, 3)
"""Layers by which borders move."""
ALONE: Final = 0.4
"""Share of the changes that move one border; the others move several next to each other."""
SETTLING: Final = 1000
"""Annealing steps from each start."""
GOING_ON: Final = 2000
"""Annealing steps from what almost fits."""
GOING_ON_TEMPERATURE: Final = 0.01
"""Excess that such a step accepts with probability 1/e at first."""


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
        self._costs, self._order, self._period, self._stretch = costs, order, period, stretch
        self.starts = _even(costs, len(order))
        self.excess = self._excess(self.starts)

    @property
    def homes(self) -> tuple[int, ...]:
        """GPU of each layer."""
        lengths = (end - first for first, end in self._visits(self.starts))
        rows = ([gpu] * count for gpu, count in zip(self._order, lengths, strict=True))
        return tuple(chain.from_iterable(rows))

    def anneal(self, random: Random, steps: int) -> None:
        """Random changes from hot to cold, until everything fits."""
        for step in range(steps):
            if self.excess <= 0:
                return
            changed = self._changed(random)
            excess = self._excess(changed)
            heat = BORDER_TEMPERATURE * (1 - step / steps) + 1e-9
            if excess <= self.excess or random.random() < exp((self.excess - excess) / heat):
                self.starts, self.excess = changed, excess

    def _visits(self, starts: list[int]) -> list[tuple[int, int]]:
        """First layer and the one behind the last of each visit."""
        return list(pairwise([*starts, self._costs.layers]))

    def _changed(self, random: Random) -> list[int]:
        """The same number of layers off one border or several; what is in the way gives way."""
        count, move = len(self.starts), random.choice(MOVES)
        first = random.randrange(1, count)
        last = first if random.random() < ALONE else random.randrange(first, count)
        layers, starts = self._costs.layers, self.starts.copy()
        for index in range(first, last + 1):
            starts[index] = min(max(starts[index] + move, 0), layers)
        for index in reversed(range(1, first)):
            starts[index] = min(starts[index], starts[index + 1])
        for index in range(first + 1, count):
            starts[index] = max(starts[index], starts[index - 1])
        return starts

    def _excess(self, starts: list[int]) -> float:
        """Sums from the end of the chain: a stage keeps what its work and all behind it take."""
        costs, period = self._costs, self._period
        loads, held, working = ([0.0] * costs.gpus for _ in range(3))
        stay, behind = 0, None
        for gpu, (first, end) in zip(
            reversed(self._order), reversed(self._visits(starts)), strict=True
        ):
            if first == end:
                continue
            size, load = costs.segment(first, end - 1), costs.load_ns(first, end - 1, gpu)
            stay += load + (0 if behind is None else _trip_ns(costs, end - 1, gpu, behind))
            behind = gpu
            loads[gpu] += load
            held[gpu] += size.states + size.saved * (stay * self._stretch / period + BETWEEN)
            working[gpu] = max(working[gpu], size.backward, size.running - size.saved)
        total = OVERLOAD * sum(max(0.0, load / period - 1) for load in loads)
        for kept, own, budget in zip(held, working, costs.budgets, strict=True):
            total += max(0.0, (kept + own) / max(1, budget) - 1)
        return total


class InterleavedStarts:
    """Starts at periods below the best plan's, drawn until the time is over."""

    name = "interleaved starts"

    def __init__(self, state: Incumbent, annealing: SimulatedAnnealing) -> None:
        """`annealing` anneals from each start."""
        self.state, self._annealing, self.random = state, annealing, state.random(self.name)
        self._elite = EliteSet()

    def run(self, seconds: float) -> None:
        """Shorten the best plan for `seconds`, while it is `far` from what may be."""
        state = self.state
        end = state.elapsed + min(seconds, state.remaining)
        if state.done or not self.far or state.costs.gpus == 1:
            return
        state.set_phase(self.name)
        while not state.done and self.far and state.elapsed < end:
            self._try(end)

    @property
    def far(self) -> bool:
        """Whether the plan is far above the bound, and memory is what keeps it there."""
        best, bound = self.state.best, self.state.bound
        return best is not None and best.per_microbatch > FAR * bound and self._is_scarce

    @cached_property
    def _is_scarce(self) -> bool:
        return is_memory_bound(self.state)

    def _try(self, end: float) -> None:
        """Annealing from a new start, then from one that came close to a plan before."""
        self._settle(self._start(), SETTLING, INITIAL_TEMPERATURE, end)
        state, best = self.state, self.state.best
        assert best is not None
        near = self._elite.take(self.random, state.bound, best.per_microbatch)
        if near is not None:
            self._settle(near, GOING_ON, GOING_ON_TEMPERATURE, end)

    def _start(self) -> Start:
        """One order of GPUs and its borders, at a period below the best plan's."""
        state, best = self.state, self.state.best
        assert best is not None
        shrink = Fraction(self.random.choice(TARGET_REDUCTIONS))
        period = max(1, int(max(state.bound, best.per_microbatch * (1 - shrink))))
        gpus = list(dict.fromkeys(stage.gpu for stage in best.stages))
        gpus += [gpu for gpu in range(state.costs.gpus) if gpu not in gpus]
        order = random_visits(gpus, self.random)
        borders = VisitCuts(state.costs, order, period, self.random.choice(STRETCHES))
        steps = self.random.choice(STEPS)
        borders.anneal(self.random, steps)
        state.options.clock.charge(steps * STEP_S)
        return Start(inf, Fraction(period), Allocation(borders.homes, frozenset()))

    def _settle(self, start: Start, steps: int, temperature: float, end: float) -> None:
        """Anneal from `start`; where that finds no plan, the closest to one may be kept."""
        excess, layout = self._annealing.anneal_from(
            start.layout, start.target, steps, end, TARGET_REDUCTIONS[0], temperature
        )
        if excess < start.excess:
            self._elite.add(Start(excess, start.target, layout))
        else:
            self._elite.add(replace(start, failures=start.failures + 1))


def random_visits(gpus: Sequence[int], random: Random) -> list[int]:
    """All GPUs in turn, then some again: in the same order or there and back."""
    count = len(gpus)
    passes = 2 if random.random() < ONCE else MOST_PASSES
    visits = count + random.randint(1, (passes - 1) * count)
    turns = [1, -1] if random.random() < 0.5 else [1]
    order: list[int] = []
    while len(order) < visits:
        order += gpus[:: turns[0]]
        turns.append(turns.pop(0))
    return order[:visits]


def _trip_ns(costs: CostModel, boundary: int, here: int, there: int) -> int:
    """Both transfers of a cut; none within a GPU."""
    if here == there:
        return 0
    forward = costs.send_forward_ns(boundary, here, there)
    return forward + costs.send_backward_ns(boundary, there, here)


def _even(costs: CostModel, visits: int) -> list[int]:
    """First layers of so many parts of about equal work."""
    total = costs.load_ns(0, costs.layers - 1, 0)
    starts, layer = [0], 0
    for visit in range(1, visits):
        while layer < costs.layers and costs.load_ns(0, layer, 0) * visits <= total * visit:
            layer += 1
        starts.append(layer)
    return starts
