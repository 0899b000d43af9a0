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
from math import inf
from random import Random
from typing import Final

from pipeplan.ilp.contiguous.unconstrained import is_memory_bound
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.local_search.allocation import Allocation
from pipeplan.ilp.local_search.annealing import INITIAL_TEMPERATURE, SimulatedAnnealing
from pipeplan.ilp.local_search.elite_set import EliteSet, Start
from pipeplan.ilp.local_search.visit_cuts import VisitCuts

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
STEPS: Final = (150, 500)
"""Changes of borders before annealing begins: few give more starts and more different ones, many
are for long chains of unlike layers."""
STEP_S: Final = 2e-6
"""What such a change counts for where work is counted instead of time."""
SETTLING: Final = 1000
"""Annealing steps from each start."""
GOING_ON: Final = 2000
"""Annealing steps from what almost fits."""
GOING_ON_TEMPERATURE: Final = 0.01
"""Excess that such a step accepts with probability 1/e at first."""


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
        clock = state.options.clock
        end = clock.spent + min(seconds, state.remaining)
        if state.done or not self.far or state.costs.gpus == 1:
            return
        state.set_phase(self.name)
        while not state.closed and self.far and clock.spent < end:  # tries charge what they do
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
        borders.anneal(self._annealing.draws, steps)
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
