"""Transfers of chosen units, bounds, comparators and the search around them."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from pipeplan.remat.bounds import (
    fluid_bound,
    paper_bound,
    phase_bound,
    smallest_cover,
    whole_bound,
)
from pipeplan.remat.checkpointing.periodic import keep_all
from pipeplan.remat.cpsat.exact import exact_offload
from pipeplan.remat.late_acceptance import late_acceptance
from pipeplan.remat.offloading.compute_order import ComputeOrder, compute_order
from pipeplan.remat.offloading.dynprog import dynprog
from pipeplan.remat.offloading.no_wait import no_wait, no_wait_in_order
from pipeplan.remat.offloading.selection import autoswap, fastest_set, greedy, tflms, vdnn
from pipeplan.remat.schedules.costs import Costs
from pipeplan.remat.schedules.host_link import HostLink
from pipeplan.remat.schedules.replay import judge
from pipeplan.remat.schedules.schedule import DeviceOpKind
from tests import grids
from tests.offload_brute import fastest_offloading
from tests.remat_brute import random_costs

ONE = HostLink(10**9)


def case(seed: int, most: int = 9) -> tuple[random.Random, Costs, ComputeOrder, int]:
    """A random chain, everything kept, and a budget between the least and the peak."""
    rng = random.Random(seed)
    costs = random_costs(rng, rng.randint(1, most))
    line = compute_order(costs, keep_all(costs))
    return rng, costs, line, rng.randint(line.least, max(line.least, line.peak))


@pytest.mark.parametrize("duplex", [False, True])
def test_no_wait_schedules_keep_rules_budget_and_time(duplex: bool) -> None:
    """The judge finds no fault, and the makespan that the builder expects."""
    built = 0
    for seed in range(250):
        rng, costs, line, budget = case(seed)
        channel = HostLink(rng.choice([None, 10**9, 3 * 10**8]), duplex)
        chosen = [unit.index for unit in line.units if rng.random() < 0.7]
        timed = no_wait(line, chosen, budget, channel)
        if timed is not None:
            outcome = judge(costs, timed.schedule, budget, channel)
            assert outcome.violations == ()
            assert outcome.makespan_ns == timed.makespan_ns
            built += 1
    assert built > 150


def test_any_order_of_copies_keeps_rules_budget_and_time() -> None:
    """Schedules of shuffled orders, too, where there are any; within a time that is asked for."""
    built = 0
    for seed in range(250):
        rng, costs, line, budget = case(seed)
        channel = HostLink(rng.choice([None, 10**9, 3 * 10**8]), rng.random() < 0.3)
        chosen = [unit.index for unit in line.units if rng.random() < 0.7]
        back = rng.sample(chosen, len(chosen))
        timed = no_wait_in_order(line, rng.sample(chosen, len(chosen)), back, budget, channel)
        if timed is not None:
            outcome = judge(costs, timed.schedule, budget, channel)
            assert outcome.violations == ()
            assert outcome.makespan_ns == timed.makespan_ns
            out = [op.index for op in timed.schedule.ops if op.kind is DeviceOpKind.OFFLOAD]
            less = timed.makespan_ns - 1
            assert no_wait_in_order(line, out, back, budget, channel, most_ns=less) is None
            again = no_wait_in_order(line, out, back, budget, channel, most_ns=timed.makespan_ns)
            assert again == timed
            built += 1
    assert built > 60


def test_a_line_needs_what_the_judge_counts() -> None:
    """Peak and least budget: all away at the least one, and nothing fits below it."""
    for seed in range(100):
        _, costs, line, _ = case(seed)
        assert line.peak == judge(costs, keep_all(costs)).peak_bytes
        every = {unit.index for unit in line.units}
        timed = no_wait(line, every, line.least, ONE)
        assert timed is not None
        assert judge(costs, timed.schedule, None, ONE).peak_bytes == line.least
        assert no_wait(line, every, line.least - 1, ONE) is None


@grids.first(1, first=range(0, 120, 10))
def test_no_method_is_faster_than_a_bound(first: int) -> None:
    """Bounds rise from the paper's to ours; all methods lie above; our search is below them."""
    for seed in range(first, first + 10):
        _, _, line, budget = case(seed, 7)
        fluid = fluid_bound(line, budget, ONE)
        assert fluid is not None
        bound = phase_bound(line, budget, ONE)
        assert paper_bound(line, budget, ONE) <= bound <= fluid + 1e-6
        whole = whole_bound(line, budget, ONE)
        assert whole is not None
        assert fluid - 1e-6 <= whole
        program = dynprog(line, budget, ONE, max(1, budget - line.static))
        sets = [greedy(line, budget), *vdnn(line), *autoswap(line, budget, ONE)]
        sets += [chosen for chosen, _ in program]
        best = fastest_set(line, sets, budget, ONE)
        assert best is not None
        found = late_acceptance(line, best[0], budget, ONE)
        assert found is not None
        assert whole - 1e-6 <= found.makespan_ns <= best[1].makespan_ns


def test_the_smallest_cover_is_that_of_all_subsets() -> None:
    """Of all sums of units that cover what lacks, the least; too many sums to tell: what lacks."""
    rng = random.Random(0)
    for _ in range(300):
        sizes = [rng.randint(0, 30) for _ in range(rng.randint(1, 8))]
        lacking = rng.randint(1, sum(sizes) or 1)
        sums = [sum(some) for n in range(9) for some in combinations(sizes, n)]
        covers = [each for each in sums if each >= lacking]
        if covers:
            assert smallest_cover(sizes, lacking) == min(covers)
    many = [2 ** (at + 1) for at in range(20)]
    assert smallest_cover(many, 2**19 + 1) == 2**19 + 1


@grids.first(1, first=(0, 30))
def test_whole_units_are_never_faster_than_their_bound(first: int) -> None:
    """(B4) is at most the fastest placement of transfers; sometimes above (B3)."""
    higher = 0
    for seed in range(first, first + 30):
        _, costs, line, budget = case(seed, 3)
        whole, fluid = whole_bound(line, budget, ONE), fluid_bound(line, budget, ONE)
        best = fastest_offloading(costs, keep_all(costs), budget, ONE)
        assert whole is not None
        assert fluid is not None
        assert best is not None
        assert whole <= best + 1e-6
        higher += whole > fluid + 1e-6
    assert higher > 3
    assert whole_bound(line, line.least - 1, ONE) is None


def test_greedy_takes_the_first_units_that_cover_the_peak() -> None:
    """As many as needed and no more; none where everything fits."""
    for seed in range(100):
        _, _, line, budget = case(seed)
        chosen = greedy(line, budget)
        first = line.units[: len(chosen)]
        assert chosen == {unit.index for unit in first}
        assert sum(unit.size for unit in first) >= line.peak - budget
        assert not first or sum(unit.size for unit in first[:-1]) < line.peak - budget
        assert no_wait(line, chosen, budget, ONE) is not None


def test_tflms_never_waits_for_room() -> None:
    """Its waits are for what comes back; where a forward would have to wait it finds nothing."""
    found = 0
    for seed in range(150):
        _, costs, line, budget = case(seed)
        timed = tflms(line, budget, ONE)
        if timed is None:
            continue
        found += 1
        assert judge(costs, timed.schedule, budget, ONE).violations == ()
        coming: set[int] = set()
        now = 0
        for step in judge(costs, timed.schedule, budget, ONE).steps:
            if step.op.kind is DeviceOpKind.PREFETCH:
                coming.add(step.op.index)
            if step.op.kind is DeviceOpKind.WAIT and step.op.index not in coming:
                assert step.end_ns == now
            now = step.end_ns if not step.moved else now
    assert found > 20


def test_rounding_never_breaks_the_budget() -> None:
    """With few slots DYNPROG's choices fit in bytes, too, or there are none; the fastest first."""
    built = 0
    for seed in range(3):
        rng = random.Random(seed)
        costs = random_costs(rng, 12, most=1000)
        line = compute_order(costs, keep_all(costs))
        for share in (0.1, 0.4, 0.8):
            budget = int(line.least + share * (line.peak - line.least))
            for slots in (13, 50, 200):
                found = dynprog(line, budget, ONE, slots)
                built += len(found)
                times = [timed.makespan_ns for _, timed in found]
                assert times == sorted(times)
                for _, timed in found:
                    assert judge(costs, timed.schedule, budget, ONE).violations == ()
    assert built > 120


def test_exact_bounds_and_beats_the_rest_in_time() -> None:
    """On chains of six layers the search proves its answer, no worse than any set in order."""
    for seed in range(4):
        rng = random.Random(seed)
        costs = random_costs(rng, 6)
        line = compute_order(costs, keep_all(costs))
        budget = (line.least + line.peak) // 2
        start = fastest_set(line, [greedy(line, budget)], budget, ONE)
        assert start is not None
        proof = exact_offload(line, budget, ONE, 20, start[1])
        assert proof.found is not None
        assert judge(costs, proof.found.schedule, budget, ONE).violations == ()
        assert proof.bound_ns == proof.found.makespan_ns <= start[1].makespan_ns


def test_exact_knows_of_units_that_take_turns_during_an_operation() -> None:
    """One leaves and another comes back during one operation: faster than if neither could."""
    rng = random.Random(128)
    costs = random_costs(rng, rng.choice((5, 6)))
    line = compute_order(costs, keep_all(costs))
    budget = rng.randint(line.least, line.peak)
    proof = exact_offload(line, budget, ONE, 60)
    assert proof.found is not None
    outcome = judge(costs, proof.found.schedule, budget, ONE)
    assert outcome.violations == ()
    assert outcome.makespan_ns == proof.bound_ns == 65
