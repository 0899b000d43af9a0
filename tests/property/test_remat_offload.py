"""Offloading planners against linear programs and exhaustive search."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from pipeplan.remat.bounds import fluid_bound
from pipeplan.remat.checkpointing.periodic import keep_all
from pipeplan.remat.cpsat.exact import exact_offload
from pipeplan.remat.offloading.compute_order import ComputeOrder, compute_order
from pipeplan.remat.offloading.discretization import discretize
from pipeplan.remat.offloading.dynprog import choose
from pipeplan.remat.schedules.costs import Costs
from pipeplan.remat.schedules.host_link import HostLink
from pipeplan.remat.schedules.replay import judge
from tests import grids
from tests.offload_brute import fastest_offloading
from tests.offload_lp import fractional, interruptible
from tests.remat_brute import random_costs

ONE = HostLink(10**9)


def _case(seed: int, sizes: tuple[int, ...]) -> tuple[Costs, ComputeOrder, int]:
    rng = random.Random(seed)
    costs = random_costs(rng, rng.choice(sizes))
    line = compute_order(costs, keep_all(costs))
    return costs, line, rng.randint(line.least, max(line.least, line.peak))


@grids.first(5, first=range(0, 300, 30))
def test_fractional_greedy_is_optimal(first: int) -> None:
    """(B3) is the linear program's optimum where parts of units may be moved (Theorem 2)."""
    for seed in range(first, first + 30):
        _, line, budget = _case(seed, (1, 2, 3, 4, 5, 6, 7, 8))
        assert fluid_bound(line, budget, ONE) == pytest.approx(fractional(line, budget))
        assert fluid_bound(line, line.least - 1, ONE) is None


@grids.first(2, first=range(0, 220, 10))
def test_dynprog_equals_all_subsets(first: int) -> None:
    """With slots of one byte no set of units idles less where transfers may be interrupted."""
    for seed in range(first, first + 10):
        _, line, budget = _case(seed, (1, 2, 3, 3, 3))
        if budget == line.static:
            continue
        none = np.zeros(len(line.units), dtype=np.int64)
        choice = choose(discretize(line, budget, ONE, budget - line.static, none))
        assert choice is not None
        assert choice.exact
        assert choice.idle + line.compute == pytest.approx(interruptible(line, budget))


@grids.first(1, first=range(0, 220, 10))
def test_exact_equals_exhaustive_search(first: int) -> None:
    """CP-SAT finds and proves the fastest placement of transfers that the device's rules allow."""
    for seed in range(first, first + 10):
        rng = random.Random(seed)
        channel = HostLink(rng.choice([10**9, 4 * 10**8]), duplex=False)
        costs, line, budget = _case(seed, (2, 3))
        proof = exact_offload(line, budget, channel, 60)
        assert proof.found is not None
        outcome = judge(costs, proof.found.schedule, budget, channel)
        assert outcome.violations == ()
        best = fastest_offloading(costs, keep_all(costs), budget, channel)
        assert outcome.makespan_ns == best == proof.bound_ns


def test_rounded_times_prove_nothing_that_is_false() -> None:
    """Times that ticks do not divide: the bound is at most the fastest placement, and near it."""
    for seed in range(6):
        costs, _, budget = _case(seed, (2, 3))
        times = {
            name: tuple(12347 * each + seed for each in getattr(costs, name))
            for name in ("forward", "light", "backward")
        }
        costs, channel = replace(costs, **times), HostLink(10**9 // 12347)
        line = compute_order(costs, keep_all(costs))
        proof = exact_offload(line, budget, channel, 60)
        best = fastest_offloading(costs, keep_all(costs), budget, channel)
        assert best is not None
        assert proof.found is not None
        assert judge(costs, proof.found.schedule, budget, channel).violations == ()
        assert 0.99 * best <= proof.bound_ns <= best <= proof.found.makespan_ns <= 1.01 * best
