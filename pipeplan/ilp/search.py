"""The search: bounds, the contiguous optimum, then several stages per GPU; anytime."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from importlib.util import find_spec

from pipeplan.ilp.bounds.infeasibility import (
    contiguous_reason,
    infeasibility_reason,
    reason_for_any_remat,
)
from pipeplan.ilp.bounds.load import closed_form_bound, contiguous_bound, load_bound
from pipeplan.ilp.contiguous.dynamic_program import ContiguousDP, ContiguousPartition
from pipeplan.ilp.contiguous.kfkb_search import KFkBSearch
from pipeplan.ilp.contiguous.partition_schedule import schedule_partition
from pipeplan.ilp.cycle_ratio import minimize_period_for_order
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.local_search.annealing import SimulatedAnnealing

CONTIGUOUS_SHARE = 0.2
"""Share of the time left that the contiguous optimum may take, and its bound, where many kinds of
GPUs make them slow."""
EAGER_SHARE = 0.25
"""Share of the time that eager cycles of contiguous partitions may take."""

WINDOWS_SHARE = 0.25
"""Share of the time left that the bound on contiguous plans may take where only these count."""

NO_SOLVER = (
    "ortools is not installed, so plans with several stages on a GPU were only searched greedily:"
    " pip install 'pipeplan[plan]' searches all"
)


def run(state: Incumbent) -> None:
    """Improve `state` until it is done or nothing is left to try; Ctrl-C ends it early."""
    _unless_interrupted(state, _everything)


def beyond(state: Incumbent) -> None:
    """As `run`, without contiguous plans: for those who know them."""
    _unless_interrupted(state, _beyond)


def prove_contiguous(state: Incumbent) -> None:
    """After `run`: raise the bound on contiguous plans where only these count.

    A step of its own: who runs the search on chains that stand for others claims no such bound.
    """
    over = state.infeasible is not None or state.done or state.phase == "interrupted"
    if over or not state.options.contiguous_only or not state.uses("window bound"):
        return
    if find_spec("ortools") is None:
        return
    from pipeplan.ilp.bounds import window  # only here: it needs CP-SAT

    try:
        window.raise_bound(state, WINDOWS_SHARE * state.remaining)
    except KeyboardInterrupt:
        state.set_phase("interrupted")


def _unless_interrupted(state: Incumbent, search: Callable[[Incumbent], None]) -> None:
    try:
        state.set_phase("bounds")
        reason = reason_for_any_remat if state.options.offload else infeasibility_reason
        state.infeasible = reason(state.costs)
        if state.infeasible is None:
            state.raise_bound("any", load_bound(state.costs), from_bytes=False)
            state.raise_bound("any", closed_form_bound(state.costs))
            search(state)
    except KeyboardInterrupt:
        if state.best is None:
            raise
        state.set_phase("interrupted")


def _everything(state: Incumbent) -> None:
    possible = contiguous(state)
    if possible and state.options.ks != (1,) and state.infeasible is None and not state.done:
        state.give("kfkb", KFkBSearch(state).run, EAGER_SHARE * state.remaining)
    if not state.options.contiguous_only:
        _beyond(state)


def _beyond(state: Incumbent) -> None:
    if state.infeasible is None and not state.done:
        _beyond_contiguous(state)


def _beyond_contiguous(state: Incumbent) -> None:
    """Allocations with several stages on a GPU, where the solver for them is installed."""
    if find_spec("ortools") is None:
        state.notes.append(NO_SOLVER)
        state.give("annealing", SimulatedAnnealing(state).run, state.remaining)
        return
    from pipeplan.ilp import general  # only here: contiguous plans need no CP-SAT

    general.search(state)


def contiguous(state: Incumbent) -> bool:
    """The best contiguous plan with k = 1, and the bound on contiguous plans of any k.

    Returns:
        Whether there may be one: False where it is proven that there is none.
    """
    state.set_phase("contiguous")
    costs, lowest = state.costs, max(1, int(state.bounds["any"]))
    most, offload = state.most_in_flight, state.options.offload
    optimistic = ContiguousDP(costs, most)
    careful = ContiguousDP(costs, most, messages=True)
    if optimistic.is_slow:
        quick, sure = (
            ContiguousDP(costs, most, messages=messages, in_order=True)
            for messages in (False, True)
        )
        offer_shortest(state, quick, sure, lowest)
    offer_shortest(state, optimistic, careful, lowest, _until(state, optimistic))
    if offload:
        away, surely = (
            ContiguousDP(costs, most, messages=messages, offload=True)
            for messages in (False, True)
        )
        offer_shortest(state, away, surely, lowest, _until(state, away))
    over = _until(state, optimistic)
    bound = None if offload else contiguous_bound(costs, state.bounds["any"], over)
    if bound is not None:
        state.raise_bound("contiguous", bound)
    elif state.options.contiguous_only and not offload:
        state.infeasible = contiguous_reason(costs)
    if costs.semantics == "flush" and state.uses("flush periods"):
        _shorter_steps(state, optimistic)
    return bound is not None or offload


def _until(state: Incumbent, solver: ContiguousDP) -> Callable[[], bool]:
    """Tells whether a slow solver has had its share of the time left; others need no look."""
    if not solver.is_slow:
        return lambda: False
    end = state.elapsed + CONTIGUOUS_SHARE * state.remaining
    return lambda: state.elapsed >= end


def offer_shortest(
    state: Incumbent,
    optimistic: ContiguousDP,
    careful: ContiguousDP,
    lowest: int,
    over: Callable[[], bool] = lambda: False,
) -> None:
    """Offer the 1F1B plan of the smallest period that fits, found by two solvers.

    Args:
        state: what hears of it.
        optimistic: counts no bytes of messages.
        careful: counts every one of them.
        lowest: a bound that is known.
        over: whether to end with what was found so far.
    """
    _, partition = optimistic.bisect(lowest, over)
    if partition is not None and not _offer_placed(state, partition):
        _bisect(state, optimistic, careful, partition.period, over)


def _offer_placed(state: Incumbent, partition: ContiguousPartition) -> bool:
    """Offer the partition's schedules with waits on either side."""
    placed = [
        schedule_partition(state.costs, partition, gradients_wait=side) for side in (True, False)
    ]
    return any([state.offer(schedule) for schedule in placed])


def _bisect(
    state: Incumbent,
    optimistic: ContiguousDP,
    careful: ContiguousDP,
    low: int,
    over: Callable[[], bool],
) -> None:
    """Messages did not fit: the smallest period at which some partition's schedule does."""
    high = optimistic.serial_ns
    while low < high and state.remaining > 0 and not over():
        middle = (low + high) // 2
        found = (solver.solve(middle) for solver in (careful, optimistic))
        if any(_offer_placed(state, partition) for partition in found if partition is not None):
            high = middle
        else:
            low = middle + 1
    if low < high and state.best is None:
        # Time is over: with room for every message a partition surely fits.
        _, last = careful.bisect(low, over)
        if last is not None:
            _offer_placed(state, last)


def _shorter_steps(state: Incumbent, solver: ContiguousDP, points: int = 24) -> None:
    """Fill and drain count: try longer periods, whose plans are shorter from end to end."""
    if state.best is None:
        return
    state.set_phase("flush periods")
    low, high = state.best.period, solver.serial_ns
    for point in range(1, points + 1):
        if state.remaining <= 0:
            return
        period = low + (high - low) * point**2 // points**2
        partition = solver.solve(period)
        if partition is None:
            continue
        for side in (True, False):
            schedule = schedule_partition(state.costs, partition, gradients_wait=side)
            state.offer(
                minimize_period_for_order(
                    state.costs, schedule, int(max(Fraction(1), state.bound))
                )
            )
