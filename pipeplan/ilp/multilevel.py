"""Multilevel search of very long chains: coarsen, solve, refine around the cuts.

Compare multilevel graph partitioning: Karypis and Kumar (1998).
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import pairwise

from pipeplan.ilp import portfolio, search
from pipeplan.ilp.bounds.infeasibility import infeasibility_reason
from pipeplan.ilp.bounds.load import closed_form_bound
from pipeplan.ilp.coarsening import CoarseChain, coarsen
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.cycle_ratio import minimize_period_for_order
from pipeplan.ilp.incumbent import Incumbent, Report
from pipeplan.ilp.schedule import Schedule

ABOVE = 256
"""Longest chain that is searched layer by layer without being asked."""
LEAST_GROUPS, GROUPS_PER_GPU = 192, 8
"""What a chain above that becomes: at least as many groups as these."""


def automatic(costs: CostModel) -> int | None:
    """How many groups a chain should be searched as; None for its own layers."""
    groups = max(LEAST_GROUPS, GROUPS_PER_GPU * costs.gpus)
    return groups if costs.exact and costs.layers > max(ABOVE, groups) else None


def run(state: Incumbent, groups: int) -> None:
    """Search on `groups` groups; twice as many where they leave no plan; then around its borders.

    Bounds of a coarse chain say nothing about the chain, so only the general one is proven. Ctrl-C
    ends it early.
    """
    try:
        _rounds(state, groups)
    except KeyboardInterrupt:
        if state.best is None:
            raise
        state.set_phase("interrupted")


def _rounds(state: Incumbent, groups: int) -> None:
    state.infeasible = infeasibility_reason(state.costs)
    if state.infeasible is not None:
        return
    state.raise_bound("any", closed_form_bound(state.costs))
    while not _round(state, _coarse(state, groups), portfolio.COARSE) and state.remaining > 0:
        groups *= 2
        if groups >= state.costs.layers:
            search.run(state)
            return
    if state.best is not None and state.phase != "interrupted" and not state.done:
        near = _near_borders(state.best, max(1, groups // 4))
        _round(state, _coarse(state, groups // 2, near), 1.0)


def _coarse(state: Incumbent, groups: int, apart: frozenset[int] = frozenset()) -> CoarseChain:
    speeds = tuple({gpu.speed for gpu in state.costs.cluster.gpus})
    pinned = {n for n, (one, two) in enumerate(pairwise(state.costs.pinned_gpus)) if one != two}
    coarse = coarsen(state.costs.chain, groups, speeds=speeds, apart=apart | pinned)
    text = (
        f"searched as {len(coarse.groups)} groups of the {state.costs.layers} layers (--coarsen)"
    )
    state.notes[:] = [*(note for note in state.notes if "(--coarsen)" not in note), text]
    return coarse


def _near_borders(best: Schedule, most: int) -> frozenset[int]:
    """The layers around each border of the stages, about `most` in all, which stay apart."""
    borders = [stage.last for stage in best.stages[:-1]]
    reach = most // (2 * max(1, len(borders)))
    end = best.stages[-1].last
    return frozenset(
        layer
        for border in borders
        for layer in range(max(0, border - reach), min(end, border + reach + 1))
    )


def _round(state: Incumbent, coarse: CoarseChain, share: float) -> bool:
    """One search on a coarse chain, whose best schedule competes; whether there is one."""
    costs = state.costs
    inner = Incumbent(
        replace(costs, chain=coarse.chain, pins=_pins(costs, coarse)),
        replace(state.options, time_limit_s=state.elapsed + share * state.remaining),
        _forwarded(state),
    )
    if state.best is not None:
        mine = _projected(coarse, state.best)
        if mine is not None:
            inner.offer(minimize_period_for_order(inner.costs, mine, 1))
    search.run(inner)
    if inner.best is not None:
        state.offer(_expanded(coarse, inner.best))
    if inner.contiguous is not None:
        state.contiguous = min(inner.contiguous, state.contiguous or inner.contiguous)
    if inner.phase == "interrupted":
        state.set_phase("interrupted")
    return inner.best is not None


def _pins(costs: CostModel, coarse: CoarseChain) -> tuple[tuple[int, int], ...]:
    """The pins of groups: each group's layers have the same."""
    homes = [costs.pinned_gpus[first] for first, _ in coarse.groups]
    return tuple((group, gpu) for group, gpu in enumerate(homes) if gpu is not None)


def _forwarded(state: Incumbent) -> Report | None:
    """Progress of the inner search with what is known about the chain itself."""
    report = state.report
    if report is None:
        return None

    def tell(
        elapsed: float, best: Fraction | None, _bound: Fraction, _gap: float | None, phase: str
    ) -> None:
        known = [one for one in (best, state.best and state.best.per_microbatch) if one]
        period = min(known, default=None)
        gap = float(period / state.bound - 1) if period and state.bound else None
        name = phase if phase == "interrupted" else f"coarse: {phase}"
        report(elapsed, period, state.bound, gap, name)

    return tell


def _expanded(coarse: CoarseChain, schedule: Schedule) -> Schedule:
    """The same times for the true layers: their ops last at most as long, and hold no more."""
    stages = tuple(
        stage.model_copy(update={"layers": coarse.layers(*stage.layers)})
        for stage in schedule.stages
    )
    return replace(schedule, stages=stages)


def _projected(coarse: CoarseChain, schedule: Schedule) -> Schedule | None:
    """The schedule on the coarse chain, if its borders are there."""
    first = {group[0]: index for index, group in enumerate(coarse.groups)}
    last = {group[1]: index for index, group in enumerate(coarse.groups)}
    if any(stage.first not in first or stage.last not in last for stage in schedule.stages):
        return None
    stages = tuple(
        stage.model_copy(update={"layers": (first[stage.first], last[stage.last])})
        for stage in schedule.stages
    )
    return replace(schedule, stages=stages)
