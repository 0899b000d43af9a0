"""Every share of the solver's time, and slices in turn for strategies.

A *strategy* shortens the best plan; a *prover* raises a bound. A search opens with each of them in
an order that suits most instances, for a share of the time that is left then. The rest is
given out in rounds by a `Portfolio`: slices grow from round to round, and a strategy that finds
nothing has half its slice the next time (compare algorithm portfolios: Gomes and Selman 2001).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Protocol

from pipeplan.ilp.incumbent import Incumbent

# Shares of the time left when a part of the search begins. First contiguous plans:
CONTIGUOUS: Final = 0.2
"""The contiguous optimum, and its bound, where many kinds of GPUs make them slow."""
KFKB: Final = 0.25
"""Contiguous plans of several micro-batches per period."""
WINDOWS: Final = 0.25
"""The bound on contiguous plans where only these count."""

# Then several stages per GPU, with too many layers for the joint model:
PACKING: Final = 0.1
"""The bound from packing equal layers."""
BRIEF: Final = 0.01
"""Load balancing and annealing at first: what is easy is found."""
BALANCING: Final = 0.25
"""Load balancing."""
INTERLEAVED: Final = 0.25
"""Interleaved starts, where memory is scarce."""
ANNEALING: Final = 0.25
"""Annealing there."""
EARLY: Final = 0.08
"""Annealing elsewhere, before the bound, which is sought below the best plan."""
COUNTING: Final = 0.25
"""The bound on counts."""

# With few layers, allocation and schedule are one model:
JOINT_ALONE: Final = 0.3
"""Share of the limit that all k of the joint model have where there are too many allocations to
look at each: local search, which finds more there, has the rest."""
JOINT: Final = 0.4
"""Each k where each allocation can be looked at by itself."""
FIRST_JOINT: Final = 0.05
"""Share of it that the model has where each allocation can be looked at by itself."""
AHEAD: Final = 0.05
"""Share of it that annealing has then, so that allocations are asked for more than they can do."""
AFTER_JOINT_S: Final = 0.1
"""Seconds that annealing has where the joint model decided all that it sees."""

# Where states may be on the host if need be:
ON_GPUS: Final = 0.5
"""Plans with all states on the GPUs, if none of them is found."""

# With recomputation:
KEEP_ALL: Final = 0.35
"""Plans without recomputation, before any others are looked at."""
LISTING: Final = 0.3
"""Listing options of segments."""
INITIAL_SETS: Final = 0.4
"""Trying initial sets of recomputed segments."""
ONE_GPU: Final = 0.25
"""A look at what one GPU may recompute beside what it offloads; then local search over that."""
BEFORE_EVERY_SET: Final = 0.02
"""Load balancing with recomputation, ahead of trying every set: the shorter the best plan, the
fewer sets are left."""
EVERY_SET: Final = 0.5
"""Trying every set where layers are few, a plan is there and larger k remain to try."""
COARSE: Final = 0.5
"""The first round on groups of layers, where chains are very long."""

FIRST_SLICE: Final = 0.2
"""Share of the time left that a slice of the first round takes."""
FIRST_SLICE_S: Final = 8.0
"""Seconds of it at most."""
LONGER: Final = 1.5
"""Factor from one round to the next."""
LEAST: Final = 0.25
"""Share of its slice that a strategy still has that never finds anything."""
IDLE: Final = 0.25
"""Where all use less than so much of a round in vain, nothing is left to try."""


class Strategy(Protocol):
    """A way to shorten the best plan, which goes on where it was left."""

    @property
    def name(self) -> str:
        """What histories and ablations call it."""
        ...

    def run(self, seconds: float) -> object:
        """Search for so long at most, by the search's clock; at once where it does not apply."""
        ...


@dataclass
class Arm:
    """A strategy, and how much of a slice it has."""

    name: str
    run: Callable[[float], object]
    share: float = 1.0


class Portfolio:
    """Strategies that take turns on one search."""

    def __init__(
        self,
        state: Incumbent,
        arms: Iterable[Arm],
        done: Callable[[], bool],
        cost: Callable[[], tuple[Fraction, Fraction]],
    ) -> None:
        """Begin no slice yet.

        Args:
            state: the clock, and which strategies are left out.
            arms: in the order of their slices.
            done: whether the search is over.
            cost: of the best plan; smaller is better.
        """
        self._state, self._done, self._cost = state, done, cost
        self._arms = [arm for arm in arms if state.uses(arm.name)]

    def run(self) -> None:
        """Rounds until the search is over, or nothing is left to try."""
        state = self._state
        slice_s = min(FIRST_SLICE_S, FIRST_SLICE * state.remaining)
        while not self._done():
            begun, before, given = state.elapsed, self._cost(), 0.0
            for arm in self._arms:
                if not self._done():
                    given += self._give(arm, slice_s)
            if self._cost() == before and state.elapsed - begun <= IDLE * given:
                return
            slice_s *= LONGER

    def _give(self, arm: Arm, slice_s: float) -> float:
        """One slice; how many seconds it may have taken."""
        before = self._cost()
        seconds = min(slice_s * arm.share, self._state.remaining)
        arm.run(seconds)
        found = self._cost() < before
        arm.share = 1.0 if found else max(LEAST, arm.share / 2)
        return seconds
