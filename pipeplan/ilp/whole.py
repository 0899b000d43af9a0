"""All layers in one model, as a finder of plans where memory is scarce.

Up to a couple of dozen layers the joint model still answers within seconds where memory leaves
few allocations: it finds plans a tenth shorter than other ways do, and refutes periods for k = 1.
Where memory is ample it answers nothing, so it is not asked there. Source: ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final

from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.model import Answer
from pipeplan.ilp.periods import attempt, scaled
from pipeplan.ilp.variables import Instance
from pipeplan.units import ceil_div

MOST_LAYERS: Final = 24
"""Layers up to which the model is asked."""
SCARCE: Final = Fraction(103, 100)
"""It is asked where the best plan is so many times longer than the bound."""
STEP_S: Final = 8.0
"""Time limit of one question at first."""
NEAREST: Final = 0.95
"""Questions come no nearer to the best plan, as a share of the way from what is refuted."""


@dataclass
class Whole:
    """Periods between those refuted and the best plan's, halfway at first."""

    state: Incumbent
    _refuted: dict[int, Fraction] = field(default_factory=dict)
    """By k: periods per micro-batch up to this one have no plan, as far as the model sees."""
    _step_s: float = STEP_S

    def run(self, seconds: float) -> None:
        """Ask for each k in turn until nothing is found in the time of a question."""
        if self.state.costs.layers > MOST_LAYERS:
            return
        end = self.state.elapsed + min(seconds, self.state.remaining)
        for k in self.state.options.ks:
            share = 0.5
            while share < NEAREST and self._worth() and self.state.elapsed < end:
                answer = self._ask(k, share, end)
                share = (1 + share) / 2 if answer in (Answer.UNKNOWN, Answer.UNFIT) else 0.5
        self._step_s *= 1.5

    def _worth(self) -> bool:
        state = self.state
        return (
            not state.done
            and state.best is not None
            and state.best.per_microbatch > SCARCE * state.bound
        )

    def _ask(self, k: int, share: float, end: float) -> Answer:
        """Whether there is a plan of this k at a share of the way to the best plan."""
        state = self.state
        assert state.best is not None
        items = tuple((layer, layer) for layer in range(state.costs.layers))
        instance = scaled(Instance(state.costs, items, k=k, most=state.most_in_flight))
        bound = state.bounds["k1" if k == 1 else "any"]
        low, high = max(bound, self._refuted.get(k, bound)), state.best.per_microbatch
        target = (low + (high - low) * Fraction(share)) * k
        period = ceil_div(int(target), instance.tick)
        state.enter(f"all layers, k={k}, {share:.0%} of the way to the best plan")
        limit = min(self._step_s, max(0.1, end - state.elapsed))
        answer = attempt(state, instance, period, limit).answer
        if answer is Answer.IMPOSSIBLE:
            self._refuted[k] = Fraction(period * instance.tick, k)
            if k == 1:
                state.prove("k1", Fraction(period * instance.tick + 1))
        return answer
