"""Evened-out allocations: full GPUs get schedules, sums stay right, alternating sizes mix."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from random import Random
from typing import Literal

import numpy as np

from pipeplan.cluster import uniform
from pipeplan.ilp.bounds.load import closed_form_bound, must_share_groups
from pipeplan.ilp.clock import DeterministicClock
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.cycle_ratio import minimize_period_for_order
from pipeplan.ilp.free_places import fits_rest, place_pair
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.local_search.allocation import Allocation
from pipeplan.ilp.local_search.assignment_annealing import AssignmentAnnealing
from pipeplan.ilp.local_search.balancing import BalanceAndSchedule, measured_estimate
from pipeplan.ilp.local_search.list_scheduler import ModuloListScheduler
from pipeplan.ilp.memory import memory_rows
from pipeplan.ilp.reservation_table import NOWHERE, add, clear, free_intervals
from pipeplan.ilp.search import contiguous
from tests import handmade
from tests.searches import limits


def test_holes_are_what_is_free() -> None:
    """Holes are the free arcs, one across the period's end too; points split them."""
    ring = np.zeros((2, 5), np.int64)
    clear(ring, 20)
    assert free_intervals(ring).tolist() == [[0, 20]]
    for start, length in ((2, 3), (5, 1), (10, 0), (14, 2)):
        add(ring, start, length)
    assert sorted(free_intervals(ring).tolist()) == [[6, 4], [10, 4], [16, 6]]


def test_a_pair_leaves_room_for_the_rest() -> None:
    """In 10 free with 4 and 4 to come, 1 and 1 go to the ends, not where they would be first."""
    holes, rest = np.array([[0, 10]]), np.array([2, 4, 4])
    assert fits_rest(holes, rest)
    assert not fits_rest(np.array([[0, 3], [5, 5]]), rest)
    found = place_pair(holes, 30, 1, 1, 3, 3, rest)
    assert NOWHERE not in found
    free = sorted(set(range(10)) - {time % 30 for time in found})
    runs = [one for one, other in pairwise([*free, 99]) if other - one > 1]
    assert len(runs) == 1, "one hole of eight is left"
    assert found[0] + 1 <= 3 <= found[1]


def test_full_gpus_are_scheduled() -> None:
    """Allocations that fill every GPU to the last ns find a schedule that keeps every order."""
    random, placed = Random(3), 0
    for _ in range(60):
        gpus, each = random.randint(2, 4), random.randint(2, 4)
        times = [(random.randint(1, 9), random.randint(1, 9)) for _ in range(each)]
        homes = [gpu for gpu in range(gpus) for _ in times]
        chain_times = times * gpus
        order = list(range(len(homes)))
        random.shuffle(order)
        costs = CostModel(
            handmade.chain([chain_times[n] for n in order]), uniform(gpus, 2**40), "2bw", "exact"
        )
        runs = [(layer, layer, homes[n]) for layer, n in enumerate(order)]
        period = sum(map(sum, times))
        placing = ModuloListScheduler(costs, runs, period)
        if placing.place():
            placed += 1
            assert minimize_period_for_order(costs, placing.schedule(), period).period == period
    assert placed > 50


def test_sums_stay_right_after_many_steps() -> None:
    """What annealing says of its allocation is what adding up the same allocation says."""
    random = Random(4)
    for turn in range(20):
        layers, gpus = random.randint(4, 12), random.randint(2, 4)
        fields = [
            {"output_bytes": random.randint(0, 9), "saved_bytes": random.randint(0, 9)}
            for _ in range(layers)
        ]
        times = [(random.randint(1, 9), random.randint(1, 9)) for _ in range(layers)]
        duplex: Literal["half", "full"] = "half" if turn % 2 else "full"
        cluster = uniform(gpus, 40, bandwidth_bytes_per_s=10**9, duplex=duplex)
        costs = CostModel(handmade.chain(times, fields), cluster, "2bw", "exact")
        period = max(max(map(sum, times)), sum(map(sum, times)) // gpus + 1)
        counts, beside = [1.0 + layer / 3 for layer in range(layers)], [0.1] * gpus
        homes = [random.randrange(gpus) for _ in range(layers)]
        one = AssignmentAnnealing(costs, period, homes, counts, beside, 0.02)
        one.anneal(random, 500)
        other = AssignmentAnnealing(costs, period, one.homes, counts, beside, 0.02)
        assert abs(one.total - other.total) < 1e-6
        assert abs(one.overload - other.overload) < 1e-6


def test_units_are_layers_that_cannot_part() -> None:
    """A cut that outlasts the period keeps its two layers together, and so layers in a row."""
    costs = CostModel(handmade.chain([(1, 1)] * 5), uniform(2, 100), "2bw", "exact")
    assert must_share_groups(costs, [9, 0, 10, 11], 9) == [(0,), (1,), (2, 3, 4)]


def tied(pins: tuple[tuple[int, int], ...]) -> CostModel:
    """Four layers on two GPUs; any cut takes 50 ns."""
    cluster = uniform(2, 100, bandwidth_bytes_per_s=10**9, duplex="half")
    of = handmade.chain([(1, 1)] * 4, [{"output_bytes": 25}] * 4)
    return CostModel(of, cluster, "2bw", "exact", pins=pins)


def test_a_unit_sits_where_a_layer_of_it_is_pinned() -> None:
    """Whichever layer that is; pins to two GPUs tear it, and no plan has such a period."""
    for layer in range(4):
        balance = AssignmentAnnealing(
            tied(((layer, 1),)), 20, [0] * 4, [1.0] * 4, [0.0, 0.0], 0.02
        )
        assert balance.units == [(0, 1, 2, 3)]
        assert balance.homes == (1, 1, 1, 1)
        assert not balance.conflicting_pins
    costs = tied(((0, 0), (2, 1)))
    assert AssignmentAnnealing(costs, 20, [0] * 4, [1.0] * 4, [0.0, 0.0], 0.02).conflicting_pins
    state = Incumbent(costs, limits(clock=DeterministicClock()))
    state.raise_bound("any", Fraction(8))
    contiguous(state)
    assert state.best is not None
    BalanceAndSchedule(state).run(5)
    assert state.elapsed < 5
    assert 8 < state.bounds["any"] <= state.best.per_microbatch


def test_measured_bytes_add_up_to_the_peak() -> None:
    """States, counts times what layers keep, and the rest are each GPU's exact peak."""
    fields = [{"saved_bytes": 5, "output_bytes": 2, "weight_bytes": 3} for _ in range(6)]
    cluster = uniform(2, 1000, bandwidth_bytes_per_s=10**9)
    costs = CostModel(handmade.chain([(2, 4)] * 6, fields), cluster, "2bw", "exact")
    placing = ModuloListScheduler(costs, [(0, 1, 0), (2, 3, 1), (4, 5, 0)], 40)
    assert placing.place()
    schedule = placing.schedule()
    counts, beside = measured_estimate(costs, schedule, 40)
    homes = Allocation.of(schedule, 1).homes
    shares = AssignmentAnnealing(costs, 40, homes, counts, beside, 0.02).bytes
    for row, share in zip(memory_rows(costs, schedule), shares, strict=True):
        assert abs(share * row.budget_bytes - row.peak_bytes) < 1e-6


def test_alternating_sizes_are_mixed() -> None:
    """10 parts of 70 and of 40 on 3 GPUs: contiguous plans need more than 370, others do not."""
    times = [(20, 50), (10, 30)] * 10
    costs = CostModel(handmade.chain(times), uniform(3, 2**40), "2bw", "exact")
    state = Incumbent(costs, limits())
    state.raise_bound("any", closed_form_bound(costs))
    contiguous(state)
    assert state.contiguous is not None
    assert state.contiguous > 370
    state.raise_bound("any", Fraction(370))
    BalanceAndSchedule(state).run(10)
    assert state.best is not None
    assert state.best.per_microbatch == 370
