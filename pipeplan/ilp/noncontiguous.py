"""Plans with several stages per GPU: exact for few layers, else strategies in time slices."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from functools import partial
from typing import Final

from pipeplan.ilp.cpsat.period_search import minimize_period, scaled, upper_bound
from pipeplan.ilp.cpsat.variables import Instance
from pipeplan.ilp.exact.enumeration import BestFirstEnumeration, allocations, nodes
from pipeplan.ilp.exact.stage_counts import StageCountEnumeration
from pipeplan.ilp.incumbent import MODEL_K, Incumbent
from pipeplan.ilp.local_search.annealing import SimulatedAnnealing
from pipeplan.ilp.local_search.assignment_model import Assignment, AssignmentModel
from pipeplan.ilp.local_search.balancing import BalanceAndSchedule
from pipeplan.ilp.local_search.interleaved_starts import InterleavedStarts
from pipeplan.ilp.local_search.layer_merging import merge_layers
from pipeplan.ilp.local_search.lns import LargeNeighbourhoodSearch
from pipeplan.ilp.local_search.restarts import EqualSplitRestarts
from pipeplan.ilp.local_search.unrestricted import UnrestrictedModel
from pipeplan.units import ceil_div

JOINT_ITEMS: Final = 14
"""Layers up to which allocation and schedule are one model."""
STEPS: Final = (1.0, 1.01, 1.03, 1.06, 1.12, 1.2, 1.35, 1.6, 2.0, 3.0)
"""Periods that the assignment model tries, as multiples of the bound."""
JOINT_SHARE: Final = 0.4
"""Share of the time left for each k of the joint model."""
FIRST_SHARE: Final = 0.05
"""Share of it that the joint model has where each allocation can be looked at by itself."""
GUIDE_SHARE: Final = 0.3
"""Share of the time left for the assignment model."""
FAR_SHARE: Final = 0.1
"""The same where there is a plan far from the bound: annealing finds more there."""
AHEAD_SHARE: Final = 0.05
"""Share of it that annealing has then, so that allocations are asked for more than they can do."""
BRIEF_S: Final = 0.1
"""Seconds that annealing has where the joint model decided all that it sees."""
TURN_S: Final = 8.0
"""Seconds that each of the ways has in its first turn; the next is longer by half."""
TURN_SHARE: Final = 0.2
"""Share of the time left that such a turn takes at most where the plan is far from the bound."""
TRIES: Final = 3
"""Allocations tried at each period and size."""

Segment = tuple[int, int]


def search(state: Incumbent) -> None:
    """Improve on the best plan; raise the bound for k = 1 where layers are few.

    Where the joint model decided all, what follows is short; else it goes on while there is time.
    """
    few = state.costs.layers <= JOINT_ITEMS
    annealing, around, balancing = (
        SimulatedAnnealing(state),
        LargeNeighbourhoodSearch(state),
        BalanceAndSchedule(state),
    )
    decided = few and state.uses("joint") and _decide(state, annealing)
    if decided:
        state.give("annealing", annealing.run, BRIEF_S)
    interleaved, restarts = (
        InterleavedStarts(state, annealing),
        EqualSplitRestarts(state, annealing),
    )
    far = interleaved.far and not decided
    if not state.done:
        share = FAR_SHARE if far else GUIDE_SHARE
        state.give("guide", partial(guided, state), share * state.remaining)
    turn = min(TURN_S, TURN_SHARE * state.remaining) if far else TURN_S
    whole, runs = UnrestrictedModel(state), StageCountEnumeration(state)
    while state.best is not None and not state.done:
        far = interleaved.far and not decided
        if far:
            state.give("annealing", annealing.run, turn)
            state.give("interleaved starts", interleaved.run, turn)
        state.give("neighbourhoods", around.run, turn)
        if decided:
            return
        state.give("stage counts", runs.run, turn)
        state.give("unrestricted", whole.run, turn)
        if not far:
            state.give("annealing", annealing.run, turn)
        state.give("balancing", balancing.run, turn)
        state.give("restarts", restarts.run, turn)
        turn *= 1.5


def _decide(state: Incumbent, annealing: SimulatedAnnealing) -> bool:
    """The joint model for each k; where it stays open and they are few, each allocation.

    Annealing goes between the two: a contiguous plan may be several times as long as need be, as
    with a weight that the first and the last layer share. Then no allocation would be left out.
    """
    each = state.uses("enumeration") and not state.options.offload
    homes = allocations(state.costs) if each else None
    decided = True
    for k in state.model_ks if len(state.options.ks) > 1 else _parts(state.options.ks[0]):
        if state.done:
            break
        asked = state.options.ks == (k,)
        seconds = state.remaining * (1.0 if asked else JOINT_SHARE)
        all_seen = True
        if homes is None:
            all_seen = joint(state, k, seconds)
        elif not joint(state, k, FIRST_SHARE * seconds):
            state.give("annealing", annealing.run, AHEAD_SHARE * seconds)
            high = upper_bound(state, Instance(state.costs, (), k=k))
            seconds *= 1 - FIRST_SHARE - AHEAD_SHARE
            all_seen = BestFirstEnumeration(state, k).run(nodes(state, homes), seconds, high)
        decided = all_seen if asked else decided and all_seen
    return decided


def _parts(k: int) -> list[int]:
    """Small divisors of the one k that is asked for, whose plans are plans of k; then k itself.

    They are found far sooner, and k need only be shorter.
    """
    return [part for part in range(1, min(k, MODEL_K + 1)) if k % part == 0] + [k]


def joint(state: Incumbent, k: int, seconds: float) -> bool:
    """Allocation and schedule together, layer by layer: solutions and proofs from one model.

    Returns:
        Whether nothing shorter is left for this k, as far as the model sees.
    """
    state.set_phase(f"joint: k={k}")
    items = tuple((layer, layer) for layer in range(state.costs.layers))
    instance = Instance(state.costs, items, k=k, most=state.most_in_flight)
    return minimize_period(state, instance, seconds, proof=True)


def guided(state: Incumbent, seconds: float) -> None:
    """Schedule what the assignment model proposes at growing periods, with large units first."""
    end = state.elapsed + seconds
    for factor in STEPS:
        for count in _sizes(state):
            tabu: list[Assignment] = []
            for _ in range(TRIES):
                target = state.bound * Fraction(factor)
                if state.done or state.elapsed > end or not _worth(state, target):
                    return
                state.set_phase(f"guide: {count} units at {factor:g} x bound")
                home = _propose(state, count, target, tabu, end)
                if home is None:
                    break
                tabu.append(home[0])
                schedule_home(state, *home, end)


def _sizes(state: Incumbent) -> Iterator[int]:
    gpus, layers = state.costs.gpus, state.costs.layers
    return iter(
        sorted({min(layers, size) for size in (2 * gpus + 8, 3 * gpus + 12, 6 * gpus + 8)})
    )


def _worth(state: Incumbent, target: Fraction) -> bool:
    return state.best is None or target < state.best.per_microbatch


def _propose(
    state: Incumbent, count: int, target: Fraction, tabu: list[Assignment], end: float
) -> tuple[Assignment, tuple[Segment, ...]] | None:
    """An allocation of coarse units that may reach `target` ns, or None."""
    items = merge_layers(state.costs, count, int(target))
    instance = scaled(Instance(state.costs, items, most=state.most_in_flight))
    period = ceil_div(int(target), instance.tick)
    guide = AssignmentModel(instance, period, 2 * state.costs.gpus + 4, tabu)
    home = guide.solve(state.options, min(4.0, max(0.1, end - state.elapsed)))
    return None if home is None else (home, items)


def schedule_home(
    state: Incumbent, home: Assignment, items: tuple[Segment, ...], end: float
) -> None:
    """The shortest period of one allocation, its runs of units as items."""
    runs: list[Segment] = []
    places: list[int] = []
    for (first, last), gpu in zip(items, home, strict=True):
        if places and places[-1] == gpu:
            runs[-1] = (runs[-1][0], last)
        else:
            runs.append((first, last))
            places.append(gpu)
    state.set_phase(f"guide: schedule of {len(runs)} stages")
    instance = Instance(
        state.costs, tuple(runs), tuple((gpu,) for gpu in places), most=state.most_in_flight
    )
    minimize_period(state, instance, min(10.0, max(0.1, end - state.elapsed)), proof=False)
