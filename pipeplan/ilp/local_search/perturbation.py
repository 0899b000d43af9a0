"""Iterated local search: annealing from the best allocation with two GPUs' stages exchanged.

Source: H. Lourenco, O. Martin, T. Stuetzle, *Iterated Local Search* (2003); the exchange is ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from fractions import Fraction
from random import Random
from typing import ClassVar, Final

from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.local_search.allocation import Allocation
from pipeplan.ilp.local_search.annealing import SimulatedAnnealing

STEPS: Final = 300
"""Of annealing, from hot to cold."""
SHORTER: Final = Fraction(1, 200)
"""By how much a plan must be shorter than the best one."""


@dataclass
class Perturbation:
    """Exchanges until the time is over."""

    state: Incumbent
    annealing: SimulatedAnnealing
    name: ClassVar[str] = "perturbation"
    random: Random = field(init=False)

    def __post_init__(self) -> None:
        """Repeatable for a seed."""
        self.random = self.state.random(self.name)

    def run(self, seconds: float) -> None:
        """Shorten the best plan, if there is one."""
        state = self.state
        end = state.elapsed + min(seconds, state.remaining)
        while state.best is not None and not state.done and state.elapsed < end:
            state.set_phase(self.name)
            target = state.best.per_microbatch * (1 - SHORTER)
            if target < state.bound or state.costs.gpus < 2:
                return
            best = Allocation.of(state.best, state.best.k)
            one, two = self.random.sample(range(state.costs.gpus), 2)
            other = {one: two, two: one}
            homes = tuple(other.get(home, home) for home in best.homes)
            self.annealing.anneal_from(replace(best, homes=homes), target, STEPS, end)
