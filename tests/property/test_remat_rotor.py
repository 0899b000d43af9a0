"""Rotor against exhaustive search over all persistent orders of operations."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from pipeplan.remat.checkpointing.rotor import rotor
from pipeplan.remat.min_memory import least_memory
from pipeplan.remat.schedules.costs import Costs
from pipeplan.remat.schedules.replay import judge
from tests import grids
from tests.remat_brute import fastest_persistent, random_costs


def _budgets(rng: random.Random, seed: int, whole: bool = False) -> tuple[Costs, int]:
    costs = random_costs(rng, 1 + seed % 4, whole=whole)
    least = judge(costs, least_memory(costs)).peak_bytes
    return costs, least


@grids.first(80, seed=range(260))
def test_rotor_equals_exhaustive_search(seed: int) -> None:
    """With units of one byte no persistent schedule is faster, also just at the minimum."""
    rng = random.Random(seed)
    costs, least = _budgets(rng, seed)
    for budget in {least, least + rng.randint(0, 6)}:
        schedule = rotor(costs, budget, slots=max(1, budget))
        assert schedule is not None
        outcome = judge(costs, schedule, budget)
        assert outcome.violations == ()
        assert outcome.makespan_ns == fastest_persistent(costs, budget)


@grids.first(60, seed=range(200))
def test_rotor_is_optimal_among_all_persistent_orders(seed: int) -> None:
    """Where no tape is smaller than its input, running a layer again early gains nothing."""
    rng = random.Random(500 + seed)
    costs, least = _budgets(rng, seed, whole=True)
    budget = least + rng.randint(0, 6)
    schedule = rotor(costs, budget, slots=max(1, budget))
    assert schedule is not None
    assert judge(costs, schedule, budget).makespan_ns == fastest_persistent(costs, budget, False)


@grids.first(60, seed=range(200))
def test_one_byte_less_than_the_least_memory_is_infeasible(seed: int) -> None:
    """Exhaustive search and Rotor agree that nothing fits below the minimum."""
    costs, least = _budgets(random.Random(1000 + seed), seed)
    if least > costs.static:
        assert fastest_persistent(costs, least - 1) is None
        assert rotor(costs, least - 1, slots=max(1, least - 1)) is None


@pytest.mark.parametrize("seed", range(20))
def test_few_slots_keep_the_budget(seed: int) -> None:
    """Rounded sizes may cost time, never memory; without a limit nothing is run twice."""
    rng = random.Random(seed)
    costs = random_costs(rng, 12, most=1000)
    least = judge(costs, least_memory(costs)).peak_bytes
    for slots in (7, 50, 500):
        budget = int(least * 1.3)
        schedule = rotor(costs, budget, slots)
        assert schedule is None or judge(costs, schedule, budget).violations == ()
    plenty = rotor(costs, 100 * least, 500)
    assert plenty is not None
    assert judge(costs, plenty).makespan_ns == costs.compute


def test_a_faster_schedule_needs_more_memory() -> None:
    """More budget is never slower at one byte per slot."""
    costs = replace(random_costs(random.Random(5), 9), static=0)
    least = judge(costs, least_memory(costs)).peak_bytes
    times = []
    for budget in range(least, least + 30):
        schedule = rotor(costs, budget, slots=budget)
        assert schedule is not None
        times.append(judge(costs, schedule, budget).makespan_ns)
    assert times == sorted(times, reverse=True)
    assert times[0] > times[-1]
