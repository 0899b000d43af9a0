"""Search for the shortest period of an instance by bisection, proving what proves itself.

Feasibility is monotone in the period: with orders and shifts kept, idle time can be added at one
instant everywhere. So an impossible period rules out all shorter ones.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Final

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.cpsat.solve import PeriodResult, Status, solve_at
from pipeplan.ilp.cpsat.variables import Instance
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.memory import memory_rows
from pipeplan.ilp.schedule import Schedule
from pipeplan.units import ceil_div

TICKS: Final = 1 << 20
"""A micro-batch's whole way takes at most about this many ticks; small integers stay exact."""
UNITS: Final = 400_000
"""The largest memory has about this many units."""
FINE_ITEMS: Final = 7
"""Items up to which times are exact ns and memory exact bytes, so that optima are proven."""
FINEST: Final = 1 << 50
"""Sums of exact times or bytes stay below this."""
REPAIRS: Final = 3
"""Attempts to make room for bytes that the model leaves out."""


def scaled(instance: Instance) -> Instance:
    """The instance with ticks and units that keep numbers small; both 1 where they are already."""
    costs = instance.costs
    tick = max(1, whole_way_ns(costs) // TICKS)
    unit = max(1, max(costs.budgets) // UNITS)
    return replace(instance, tick=tick, unit=unit)


def exact_scaling(instance: Instance) -> Instance:
    """In exact ns and bytes where items are few, else scaled."""
    costs, count = instance.costs, len(instance.items)
    times = 16 * count * instance.k * whole_way_ns(costs)
    states = sum(costs.segment(*item).states for item in instance.items)
    kept = sum(costs.segment(*item).saved for item in instance.items)
    largest = max(*costs.budgets, states + 16 * count * instance.k * kept)
    if count <= FINE_ITEMS and max(times, largest) < FINEST:
        return replace(instance, tick=1, unit=1)
    return scaled(instance)


def whole_way_ns(costs: CostModel) -> int:
    """All work of one micro-batch on the slowest GPU, every boundary cut on the slowest link."""
    slowest = max(costs.load_ns(0, costs.layers - 1, gpu) for gpu in range(costs.gpus))
    overhead = 2 * costs.cluster.action_overhead_ns * costs.layers
    if costs.gpus == 1:
        return slowest + overhead
    pairs = [(p, q) for p in range(costs.gpus) for q in range(costs.gpus) if p != q]
    slow_links = {costs.link(p, q): (p, q) for p, q in pairs}.values()
    transfers = sum(
        max(
            costs.send_forward_ns(layer, p, q) + costs.send_backward_ns(layer, p, q)
            for p, q in slow_links
        )
        for layer in range(costs.layers - 1)
    )
    return slowest + overhead + transfers


def minimize_period(
    state: Incumbent, instance: Instance, seconds: float, *, proof: bool, lowest: int = 1
) -> Status:
    """Look for better schedules: at the bound itself, then by bisection, until the time limit.

    Below a schedule that was found, the first impossible period makes the next step ask for
    anything better at all: often nothing is left, which two refutations then prove instead of one
    for each halving. If that stays open, bisection raises the bound first.

    Args:
        state: Takes schedules and bounds.
        instance: What is to be scheduled.
        seconds: Limit for all steps together.
        proof: Whether an impossible period is one for every plan of this k: layers are the items
            and the allocation is free. For k = 1 it then raises the bound.
        lowest: No shorter period (ticks) is possible.

    Returns:
        INFEASIBLE where nothing shorter is left; MEMORY_OVERFLOW where each period that matters
        was decided, but at some of them the exact bytes of what was found do not fit, as those
        of another schedule may; else UNKNOWN.
    """
    instance = exact_scaling(instance)
    tick, k = instance.tick, instance.k
    end = state.elapsed + seconds
    low, high = max(lowest, _lowest(state, instance)), upper_bound(state, instance)
    period, seen, found, hard = low, Status.INFEASIBLE, False, False
    while low <= high and not state.done and state.elapsed < end:
        limit = min(max(0.5, (end - state.elapsed) / 3), state.remaining)
        answer = solve_and_repair(state, instance, period, limit).status
        if answer is Status.FEASIBLE:
            high = min(period - 1, upper_bound(state, instance))
            found, hard = True, False
        elif answer is Status.UNKNOWN and low < period == high:
            hard = True
        else:
            if seen is not Status.UNKNOWN and answer is not Status.INFEASIBLE:
                seen = answer
            if answer is Status.INFEASIBLE and proof and k == 1:
                state.raise_bound("k1", Fraction(period * tick + 1))
            low = period + 1
        last = found and not hard and answer is Status.INFEASIBLE
        period = high if last else (low + high) // 2
    return seen if low > high else Status.UNKNOWN


def _lowest(state: Incumbent, instance: Instance) -> int:
    """The tick period of the bound."""
    bound = state.bounds["k1" if instance.k == 1 else "any"] * instance.k
    return max(1, ceil_div(int(-(-bound // 1)), instance.tick))


def upper_bound(state: Incumbent, instance: Instance, tick: int | None = None) -> int:
    """The period of a plan one ns better than the best; without one, of a serial plan.

    Args:
        state: What is known.
        instance: What is to be scheduled.
        tick: Ns of one unit of the answer; the instance's if not given.
    """
    tick = tick or instance.tick
    if state.best is None:
        return ceil_div(whole_way_ns(instance.costs) * instance.k, tick) + 1
    target = -(-state.best.per_microbatch * instance.k // 1) - 1
    return int(ceil_div(target, tick))


def solve_and_repair(
    state: Incumbent, instance: Instance, period: int, seconds: float
) -> PeriodResult:
    """Solve at one period and offer what is found, making room where exact bytes do not fit."""
    budgets = instance.costs.budgets
    lowest = state.lowest_period(instance.k)
    for repair in range(1 + REPAIRS):
        result = solve_at(instance, period, budgets, state.options, seconds, lowest)
        if result.status is not Status.FEASIBLE:
            return result if repair == 0 else PeriodResult(Status.MEMORY_OVERFLOW)
        if any([state.offer(schedule) for schedule in result.schedules]):
            return result
        budgets = _less(instance.costs, budgets, result.schedules[0])
        if min(budgets) < 0:
            break
    return PeriodResult(Status.MEMORY_OVERFLOW)


def _less(costs: CostModel, budgets: tuple[int, ...], schedule: Schedule) -> tuple[int, ...]:
    """Budgets lowered by what the exact count of the schedule was over."""
    over = [max(0, row.peak_bytes - row.budget_bytes) for row in memory_rows(costs, schedule)]
    return tuple(budget - more for budget, more in zip(budgets, over, strict=True))
