"""Plans with several stages per GPU: exact for few layers, else strategies that take turns."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final

from pipeplan.ilp import portfolio
from pipeplan.ilp.bounds import packing
from pipeplan.ilp.bounds.assignment import find_feasible_assignment, serial_schedule
from pipeplan.ilp.bounds.counting import raise_bound
from pipeplan.ilp.bounds.infeasibility import assignment_reason
from pipeplan.ilp.cpsat.extract import fuse
from pipeplan.ilp.cpsat.period_search import FINE_ITEMS, minimize_period, upper_bound
from pipeplan.ilp.cpsat.solve import Status
from pipeplan.ilp.cpsat.variables import Instance
from pipeplan.ilp.cycle_ratio import instant_ops, minimize_period_for_order
from pipeplan.ilp.exact.allocations import FEW, NODE_S, allocations
from pipeplan.ilp.exact.enumeration import BestFirstEnumeration, nodes
from pipeplan.ilp.incumbent import MODEL_K, Incumbent
from pipeplan.ilp.local_search.annealing import SimulatedAnnealing
from pipeplan.ilp.local_search.balancing import BalanceAndSchedule
from pipeplan.ilp.local_search.interleaved_starts import InterleavedStarts
from pipeplan.ilp.portfolio import Arm, Portfolio, Strategy

JOINT_ITEMS: Final = 14
"""Layers up to which allocation and schedule are one model."""
MOST: Final = 60_000
"""Allocations up to which each is looked at with k = 1: orders decide most in milliseconds."""

STRATEGIES: Final[tuple[Callable[[Incumbent, SimulatedAnnealing], Strategy], ...]] = (
    InterleavedStarts,
    lambda _, annealing: annealing,
    BalanceAndSchedule,
)
"""In the order of their slices; some anneal from what they find."""


class NoncontiguousSearch:
    """One search, which goes on where it was left: its strategies keep what they know."""

    def __init__(self, state: Incumbent) -> None:
        """`state` hears of plans and bounds."""
        self.state = state
        annealing = SimulatedAnnealing(state)
        strategies = [make(state, annealing) for make in STRATEGIES]
        self._runs = {each.name: each.run for each in strategies}
        self._interleaved = next(
            each for each in strategies if isinstance(each, InterleavedStarts)
        )
        arms = [Arm(each.name, each.run) for each in strategies]
        self._rounds = Portfolio(state, arms, lambda: state.done, lambda: state.cost)
        self._opened = self._decided = False

    def run(self) -> None:
        """Find a plan where there is none yet, or prove that none exists; improve it."""
        if not self._opened:
            self._opened = True
            self._open()
        few = self.state.costs.layers <= JOINT_ITEMS and self.state.uses("joint")
        if few and not self._over and not self._decided:
            # The models know plans that keep all bytes on the GPUs: they decide those alone.
            self._decided = self._decide() and not self.state.options.offload
            if self._decided:
                self._give("annealing", portfolio.AFTER_JOINT_S)
        if not self._over and not self._decided and self.state.best is not None:
            self._rounds.run()

    @property
    def _over(self) -> bool:
        return self.state.done or self.state.infeasible is not None

    def _open(self) -> None:
        """A plan, bounds, and between them better plans where the joint model takes long."""
        state = self.state
        if state.best is None:
            find_any_plan(state)
        self._prove("packing bound", packing.raise_bound, portfolio.PACKING)
        if state.costs.layers > FINE_ITEMS and state.infeasible is None:
            self._shorten()
        if not state.options.offload:
            self._prove("counting bound", raise_bound, portfolio.COUNTING)

    def _prove(
        self, name: str, prover: Callable[[Incumbent, float], object], share: float
    ) -> None:
        if not self._over:
            self.state.give(name, partial(prover, self.state), share * self.state.remaining)

    def _give(self, name: str, seconds: float) -> None:
        if not self.state.done:
            self.state.give(name, self._runs[name], seconds)

    def _shorten(self) -> None:
        """Load balancing, then annealing; interleaved starts where memory is what binds."""
        state = self.state
        few = state.costs.layers <= JOINT_ITEMS
        for name, share in (
            ("balancing", portfolio.BRIEF),
            ("annealing", portfolio.BRIEF),
            ("balancing", portfolio.EARLY if few else portfolio.BALANCING),
            ("interleaved starts", portfolio.EARLY if few else portfolio.INTERLEAVED),
        ):
            self._give(name, share * state.remaining)
        far = self._interleaved.far and not few
        self._give(
            "annealing", (portfolio.ANNEALING if far else portfolio.EARLY) * state.remaining
        )

    def _decide(self) -> bool:
        """The joint model for each k; where it stays open and they are few, each allocation.

        Annealing goes between the two: a contiguous plan may be several times as long as need be,
        as with a weight that the first and the last layer share. Then no allocation would be left
        out. Where the joint model decided all, what follows is short.
        """
        state = self.state
        homes = allocations(state.costs, MOST) if state.uses("enumeration") else None
        state.options.clock.charge(NODE_S * len(homes or ()))
        decided = True
        ks = state.model_ks if len(state.options.ks) > 1 else _parts(state.options.ks[0])
        each_s = portfolio.JOINT_ALONE * state.options.time_limit_s / len(ks)
        for k in ks:
            if state.done:
                break
            asked = state.options.ks == (k,)
            seconds = state.remaining * (1.0 if asked else portfolio.JOINT)
            all_seen = True
            if homes is None or (k > 1 and len(homes) > FEW):
                all_seen = joint(state, k, min(each_s, state.remaining))
            elif not joint(state, k, portfolio.FIRST_JOINT * seconds):
                self._give("annealing", portfolio.AHEAD * seconds)
                high = upper_bound(state, Instance(state.costs, (), k=k))
                seconds *= 1 - portfolio.FIRST_JOINT - portfolio.AHEAD
                all_seen = BestFirstEnumeration(state, k).run(nodes(state, homes), seconds, high)
            decided = all_seen if asked else decided and all_seen
        return decided


def find_any_plan(state: Incumbent) -> None:
    """Spread the layers over the GPUs, one micro-batch at a time, or prove that it cannot be.

    The spread is for whole backwards: it proves nothing where they may be split.
    """
    state.set_phase("assignment")
    costs = state.costs
    found = find_feasible_assignment(costs, state.options, state.remaining)
    if found.missing and not state.options.offload and not costs.splits:
        state.infeasible = assignment_reason(costs, found.missing)
    if found.home is not None:
        schedule = minimize_period_for_order(costs, serial_schedule(costs, found.home), 1)
        state.offer(fuse(schedule, instant_ops(costs, schedule.stages)) or schedule)
        state.offer(schedule)


def _parts(k: int) -> list[int]:
    """Small divisors of the one k that is asked for, whose plans are plans of k; then k itself.

    They are found far sooner, and k need only be shorter.
    """
    return [part for part in range(1, min(k, MODEL_K + 1)) if k % part == 0] + [k]


def joint(state: Incumbent, k: int, seconds: float) -> bool:
    """Allocation and schedule together, layer by layer: solutions and proofs from one model.

    Returns:
        Whether nothing shorter is left for this k.
    """
    state.set_phase(f"joint: k={k}")
    items = tuple((layer, layer) for layer in range(state.costs.layers))
    instance = Instance(state.costs, items, k=k, most=state.most_in_flight)
    return minimize_period(state, instance, seconds, proof=True) is Status.INFEASIBLE
