"""The search: bounds, the contiguous optimum, then several stages per GPU; anytime."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from functools import partial
from importlib.util import find_spec

from pipeplan.ilp import one_gpu, portfolio
from pipeplan.ilp.bounds.infeasibility import (
    contiguous_reason,
    infeasibility_reason,
    reason_for_any_remat,
)
from pipeplan.ilp.bounds.load import closed_form_bound, contiguous_bound, load_bound
from pipeplan.ilp.clock import OutOfTimeError
from pipeplan.ilp.contiguous import small_stages
from pipeplan.ilp.contiguous.dynamic_program import ContiguousDP, ContiguousPartition
from pipeplan.ilp.contiguous.kfkb_search import KFkBSearch
from pipeplan.ilp.contiguous.partition_schedule import schedule_partition
from pipeplan.ilp.cycle_ratio import minimize_period_for_order
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.local_search.annealing import SimulatedAnnealing
from pipeplan.ilp.step.bound import step_bound
from pipeplan.ilp.step.search import StepSearch

NO_SOLVER = (
    "ortools is not installed, so plans with several stages on a GPU were only searched greedily:"
    " pip install 'pipeplan[plan]' searches all"
)


class ChainSearch:
    """All of the search on one chain; it goes on where it was left."""

    def __init__(self, state: Incumbent, *, contiguous_known: bool = False) -> None:
        """Begin nothing yet.

        Args:
            state: hears of plans and bounds.
            contiguous_known: whether contiguous plans were searched already.
        """
        self.state = state
        self.cycles = KFkBSearch(state)
        """Contiguous plans of several micro-batches per period."""
        self._known, self._kfkb = contiguous_known, False
        self._beyond: Callable[[], None] | None = None

    def run(self) -> None:
        """Improve the state until it is done or nothing is left to try; Ctrl-C ends it early."""
        state = self.state
        try:
            state.set_phase("bounds")
            # At a micro-batch's loss all that its forwards keep is there, split backwards or not.
            reason = reason_for_any_remat if state.options.offload else infeasibility_reason
            state.infeasible = reason(state.costs)
            if state.infeasible is None:
                state.raise_bound("any", load_bound(state.costs), from_bytes=False)
                if state.options.whole_step:
                    self._whole_step()
                else:
                    state.raise_bound("any", closed_form_bound(state.costs))
                    self._search()
        except KeyboardInterrupt:
            if state.best is None:
                raise
            state.set_phase("interrupted")

    def _whole_step(self) -> None:
        """The contiguous periodic plan, cut off after the step, as a start; then step plans.

        Bounds that follow from bytes hold for backwards that are not split: none is taken here.
        """
        state = self.state
        state.raise_bound("any", step_bound(state.costs, state.options.microbatches))
        # Its periods are no steps: nobody hears of them.
        periodic = Incumbent(state.costs, replace(state.options, whole_step=False))
        periodic.raise_bound("any", load_bound(state.costs))  # a step's has fill and drain in it
        contiguous(periodic)
        if periodic.best is not None:
            state.offer(periodic.best)
            state.contiguous = None
        if state.best is None and (state.costs.pins or state.costs.tied_groups):
            _find_any_plan(state)  # no placement that is tried by itself may keep them
        state.give(StepSearch.name, StepSearch(state).run, state.remaining)
        if state.best is None:
            _find_any_plan(state)

    def _search(self) -> None:
        """Contiguous plans first, the best with k = 1 but once; then all others."""
        state = self.state
        if not self._known:
            self._known = True
            self._kfkb = contiguous(state) and state.options.ks != (1,)
        if self._kfkb and state.infeasible is None and not state.done:
            state.give("kfkb", self.cycles.run, portfolio.KFKB * state.remaining)
        if one_gpu.applies(state) and not state.done:
            state.give(one_gpu.NAME, partial(one_gpu.run, state), state.remaining)
        if not state.options.contiguous_only and state.infeasible is None and not state.done:
            self._beyond = self._beyond or _beyond(state)
            self._beyond()


def _find_any_plan(state: Incumbent) -> None:
    """A plan that keeps pins and memory, if there is the solver to find it."""
    if find_spec("ortools") is not None:
        from pipeplan.ilp.noncontiguous import find_any_plan  # only here: it needs CP-SAT

        find_any_plan(state)


def run(state: Incumbent) -> None:
    """Improve `state` until it is done or nothing is left to try; Ctrl-C ends it early."""
    ChainSearch(state).run()


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
        window.raise_bound(state, portfolio.WINDOWS * state.remaining)
    except KeyboardInterrupt:
        state.set_phase("interrupted")


def _beyond(state: Incumbent) -> Callable[[], None]:
    """The search for plans with several stages on a GPU; annealing alone without its solver."""
    if find_spec("ortools") is None:
        state.notes.append(NO_SOLVER)
        annealing = SimulatedAnnealing(state)
        return lambda: state.give(annealing.name, annealing.run, state.remaining)
    from pipeplan.ilp import noncontiguous  # only here: contiguous plans need no CP-SAT

    return noncontiguous.NoncontiguousSearch(state).run


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
    offer_shortest(state, optimistic, careful, lowest)
    if offload:
        away, surely = (
            ContiguousDP(costs, most, messages=messages, offload=True)
            for messages in (False, True)
        )
        offer_shortest(state, away, surely, lowest)
        if small_stages.applies(state) and not state.closed:
            small_stages.shorten(state, lowest)
    bound = None
    if not offload:
        over = optimistic.limit(state.options, portfolio.CONTIGUOUS)
        bound = contiguous_bound(costs, state.bounds["any"], over)
    if bound is not None:
        state.raise_bound("contiguous", bound)
    elif state.options.contiguous_only and not offload:
        state.infeasible = contiguous_reason(costs)
    if costs.semantics == "flush" and state.uses("flush periods"):
        _shorter_steps(state, optimistic)
    return bound is not None or offload


def offer_shortest(
    state: Incumbent, optimistic: ContiguousDP, careful: ContiguousDP, lowest: int
) -> None:
    """Offer the 1F1B plan of the smallest period that fits, found by two solvers.

    Slow ones have a share of the time left; what they found until then is offered.

    Args:
        state: what hears of it.
        optimistic: counts no bytes of messages.
        careful: counts every one of them.
        lowest: a bound that is known.
    """
    over = optimistic.limit(state.options, portfolio.CONTIGUOUS)
    try:
        partition = optimistic.shortest(lowest, over)
        if partition is not None and not _offer_placed(state, partition):
            _bisect(state, optimistic, careful, partition.period, over)
    except OutOfTimeError:
        return


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
    """Messages did not fit: the smallest period at which some partition's schedule does.

    Raises:
        OutOfTimeError: where it is over.
    """
    high = optimistic.serial_ns
    while low < high and state.remaining > 0:
        middle = (low + high) // 2
        found = (solver.solve(middle, over=over) for solver in (careful, optimistic))
        if any(_offer_placed(state, partition) for partition in found if partition is not None):
            high = middle
        else:
            low = middle + 1
    if low < high and state.best is None:
        # Time is over: with room for every message a partition surely fits.
        last = careful.shortest(low, over)
        if last is not None:
            _offer_placed(state, last)


def _shorter_steps(state: Incumbent, solver: ContiguousDP, points: int = 24) -> None:
    """Fill and drain count: try longer periods, whose plans are shorter from end to end."""
    if state.best is None:
        return
    state.set_phase("flush periods")
    low, high = int(state.best.per_microbatch), solver.serial_ns
    over = solver.limit(state.options, portfolio.CONTIGUOUS)
    for point in range(1, points + 1):
        if state.remaining <= 0:
            return
        period = low + (high - low) * point**2 // points**2
        try:
            partition = solver.solve(period, over=over)
        except OutOfTimeError:
            return
        if partition is None:
            continue
        for side in (True, False):
            schedule = schedule_partition(state.costs, partition, gradients_wait=side)
            state.offer(
                minimize_period_for_order(
                    state.costs, schedule, int(max(Fraction(1), state.bound))
                )
            )
