"""Random restarts of load balancing, from an equal split of the chain.

With ample memory a plan stays above the bound because its loads are uneven, and the best plan's
allocation is a local optimum: several units must change GPUs at once, through worse allocations.
Each restart anneals an assignment slowly from an equal split of the chain, with the in-flight
counts of a contiguous plan. It draws a target period and a price per cut: a low price balances
loads better, a high one keeps fewer micro-batches in flight. Then, as in `balancing`, a schedule
gives the real counts, and annealing goes on from what fits nearly. Source: ours.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import ceil, exp, log
from typing import Final

from pipeplan.ilp.local_search.allocation import Allocation
from pipeplan.ilp.local_search.assignment_annealing import AssignmentAnnealing
from pipeplan.ilp.local_search.balancing import (
    STEP_S,
    BalanceAndSchedule,
    Estimate,
    ScheduledAllocation,
)

WITHIN: Final = Fraction(3, 20)
"""It is for plans that lie so far above the bound at most."""
STEPS: Final = 1000
"""Steps for each unit: so slow that few cuts and even loads come together."""
STEP_WALL_S: Final = 1e-5
"""What a step takes at most, about: the last round is as short as the time that is left."""
ROUNDS: Final = 4
"""Corrections at one period and price."""
SHARES: Final = (0.2, 0.9)
"""How far from the bound to the best plan the periods lie."""
PRICES: Final = (0.002, 0.03)
"""Prices of a cut, in periods of load beyond the period."""
CHEAPER: Final = 0.7
"""Factor of the price where loads did not come out even enough."""
BESIDE: Final = 0.1
"""Share of each memory that is taken by what is not kept, at first."""
NEAR: Final = 0.4
"""Bytes beyond memory, in memories of a GPU, from which annealing goes on."""
SETTLING: Final = 600
"""Its steps."""


class EqualSplitRestarts(BalanceAndSchedule):
    """Periods and prices drawn until the time is over."""

    name = "restarts"

    def run(self, seconds: float) -> None:
        """Shorten the best plan, if it is near enough to the bound; there must be one."""
        state = self.state
        end = state.elapsed + min(seconds, state.remaining)
        while not self._over(end):
            known = self._best()
            if known is None or state.costs.gpus == 1:
                return
            best, bound = known.per_microbatch, state.bound
            period = int(bound + (best - bound) * Fraction(self.random.uniform(*SHARES)))
            if not bound <= period < best <= bound * (1 + WITHIN):
                return
            price = exp(self.random.uniform(*map(log, PRICES)))
            state.set_phase(f"restarts: a cut at {price:.1%}")
            self._once(period, price, end)

    def _once(self, period: int, price: float, end: float) -> None:
        """Balance, schedule, correct; until a better plan is found or nothing comes of it."""
        best, guess = self._best(), self._equal_shares()
        for _ in range(ROUNDS):
            if self._over(end):
                return
            balance = self._balance(period, guess, price)
            if balance.conflicting_pins:
                self.state.raise_bound("any", Fraction(period + 1), from_bytes=False)
                return
            self._anneal(balance, end)
            layout = self._layout(balance)
            placed = self._scheduled(layout, ceil(period * (1 + balance.overload)))
            if placed is None:
                price *= CHEAPER
                continue
            self._improve(placed, end)
            if self._best() is not best:
                return
            guess = self._corrected(replace(guess, layout=layout), placed, period)

    def _equal_shares(self) -> Estimate:
        """As many layers on each GPU, in order, and what each then keeps in flight."""
        layers, gpus = self.state.costs.layers, self.state.costs.gpus
        homes = tuple(layer * gpus // layers for layer in range(layers))
        counts = [2.0 * (gpus - home) - 1 for home in homes]
        return Estimate(Allocation(homes, frozenset()), counts, [BESIDE] * gpus)

    def _anneal(self, balance: AssignmentAnnealing, end: float) -> None:
        left = max(0.0, end - self.state.elapsed)
        steps = min(STEPS * len(balance.units), int(left / STEP_WALL_S))
        balance.anneal(self.random, steps)
        self.state.options.clock.charge(steps * STEP_S)

    def _improve(self, placed: ScheduledAllocation, end: float) -> None:
        """Offer a schedule; where it lacks a little, anneal from its allocation."""
        if not self._offer(placed) and self._excess(placed) < NEAR:
            target = Fraction(placed.schedule.period)
            self._annealing.anneal_from(placed.layout, target, SETTLING, end)
