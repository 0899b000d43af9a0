"""The unrestricted CP-SAT model, all layers free at once, as a finder where memory is scarce.

Up to a couple of dozen layers the model still answers within seconds where memory leaves few
allocations: it finds plans a tenth shorter than other strategies do, and refutes periods for k =
1. With ample memory it does not answer in time, so it is not solved there. Source: ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import Final

from pipeplan.ilp.cpsat.period_search import scaled, solve_and_repair, upper_bound
from pipeplan.ilp.cpsat.solve import Status
from pipeplan.ilp.cpsat.variables import Instance
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.local_search.lns import MAX_TASKS
from pipeplan.units import ceil_div

MOST_LAYERS: Final = 24
"""Layers up to which the model is asked."""
MIN_GAP: Final = Fraction(103, 100)
"""It is asked where the best plan is so many times longer than the bound."""
STEP_S: Final = 8.0
"""Time limit of one question at first."""
NEAREST: Final = 0.95
"""Questions come no nearer to the best plan, as a share of the way from what is refuted."""


@dataclass
class UnrestrictedModel:
    """Periods between those refuted and the best plan's, halfway at first."""

    state: Incumbent
    _refuted: dict[int, Fraction] = field(default_factory=dict)
    """By k: periods per micro-batch below this one have no plan, as far as the model sees."""
    _step_s: float = STEP_S

    def run(self, seconds: float) -> None:
        """Ask for each k in turn until nothing is found in the time of a question."""
        layers = self.state.costs.layers
        if layers > MOST_LAYERS:
            return
        end = self.state.elapsed + min(seconds, self.state.remaining)
        for k in self.state.model_ks:
            if layers * k <= MAX_TASKS:
                self._search(k, end)
        self._step_s *= 1.5

    def _search(self, k: int, end: float) -> None:
        """Ask nearer and nearer to the best plan, from halfway again where an answer moved an end.

        Not every answer does: a shorter period may be no shorter step, and periods are rounded.
        """
        state, share = self.state, 0.5
        items = tuple((layer, layer) for layer in range(state.costs.layers))
        instance = scaled(Instance(state.costs, items, k=k, most=state.most_in_flight))
        asked: set[int] = set()
        while share < NEAREST and self._worth() and state.elapsed < end:
            period = self._period(instance, share)
            if period is None:
                return
            moved = False
            if period not in asked:
                asked.add(period)
                state.set_phase(f"unrestricted: k={k}, {share:.0%} of the way to the best plan")
                moved = self._ask(instance, period, end)
            share = 0.5 if moved else (1 + share) / 2

    def _worth(self) -> bool:
        state = self.state
        return (
            not state.done
            and state.best is not None
            and state.best.per_microbatch > MIN_GAP * state.bound
        )

    def _period(self, instance: Instance, share: float) -> int | None:
        """The period (ticks) at a share of the way to the best plan; None if none is left."""
        state, k, tick = self.state, instance.k, instance.tick
        assert state.best is not None
        bound = state.bounds["k1" if k == 1 else "any"]
        low, high = max(bound, self._refuted.get(k, bound)), state.best.per_microbatch
        target = ceil((low + (high - low) * Fraction(share)) * k)
        period = min(ceil_div(target, tick), upper_bound(state, instance))
        return period if period * tick >= low * k else None

    def _ask(self, instance: Instance, period: int, end: float) -> bool:
        """Whether an answer at this period (ticks) gave a better plan or refuted the period."""
        state, k = self.state, instance.k
        before = state.best
        limit = min(self._step_s, max(0.1, end - state.elapsed))
        answer = solve_and_repair(state, instance, period, limit).status
        if answer is Status.INFEASIBLE:
            self._refuted[k] = Fraction(period * instance.tick + 1, k)
            if k == 1:
                state.raise_bound("k1", self._refuted[k])
        return answer is Status.INFEASIBLE or state.best is not before
