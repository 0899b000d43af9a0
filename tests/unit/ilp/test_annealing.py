"""List schedules and simulated annealing: reservation tables, schedules that keep every rule."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeplan.cluster import uniform
from pipeplan.ilp.clock import DeterministicClock
from pipeplan.ilp.compiled import Floats
from pipeplan.ilp.contiguous.dynamic_program import ContiguousDP
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.cycle_ratio import minimize_period_for_order
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.local_search.allocation import Allocation
from pipeplan.ilp.local_search.allocation_walk import AllocationWalk
from pipeplan.ilp.local_search.annealing import (
    JUDGED_S,
    PLACED_S,
    STEP_S,
    SimulatedAnnealing,
)
from pipeplan.ilp.local_search.list_scheduler import ModuloListScheduler, overload
from pipeplan.ilp.memory import memory_rows
from pipeplan.ilp.reservation_table import NOWHERE, add, clear, earliest_fit, latest_fit, remove
from pipeplan.ilp.search import contiguous
from pipeplan.plan import MemoryModel, OpKind
from tests import handmade
from tests.random_placements import random_costs, random_runs
from tests.searches import limits

PERIOD = 12


@settings(max_examples=300, derandomize=True, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, PERIOD - 1), st.integers(0, 4)), max_size=6),
    st.integers(-20, 20),
    st.integers(1, 5),
)
def test_ring_finds_nearest(arcs: list[tuple[int, int]], time: int, length: int) -> None:
    """`earliest_fit` and `latest_fit` are the nearest free places, as instant by instant.

    They still are when another arc was there for a while.
    """
    ring, busy = np.zeros((2, len(arcs) + 2), np.int64), set[int]()
    clear(ring, PERIOD)
    borders: set[int] = set()
    for start, long in arcs:
        inside = {(start + tick) % PERIOD for tick in range(long)}
        covered = not long and start in busy and (start - 1) % PERIOD in busy
        if not inside & busy and not covered and not _across(start, long, borders):
            add(ring, start, long)
            busy |= inside
            borders |= {start} if not long else set()
    free = [
        start
        for start in range(time - 2 * PERIOD, time + 2 * PERIOD)
        if not {(start + tick) % PERIOD for tick in range(length)} & busy
        and not _across(start, length, borders)
    ]
    earliest = min((x for x in free if x >= time), default=NOWHERE)
    latest = max((x for x in free if x + length <= time), default=NOWHERE)
    assert earliest_fit(ring, time, length) == earliest
    assert latest_fit(ring, time, length) == latest
    if free:
        add(ring, earliest, length)
        remove(ring, earliest, length)
        assert earliest_fit(ring, time, length) == earliest
        assert latest_fit(ring, time, length) == latest


def _across(start: int, length: int, points: set[int]) -> bool:
    """Whether an arc without length lies strictly inside."""
    return any((start + tick) % PERIOD in points for tick in range(1, length))


def test_placements_keep_rules() -> None:
    """Whatever is placed keeps its orders: retiming at the same period finds times for them."""
    random, done = Random(5), 0
    for _ in range(300):
        costs = random_costs(random, "exact", 3)
        runs, k = random_runs(random, costs), random.choice((1, 1, 2, 3))
        period = k * costs.load_ns(0, costs.layers - 1, 0)
        placed = ModuloListScheduler(
            costs, runs, period, [copy * period // k for copy in range(k)]
        )
        if placed.place():
            done += 1
            early = minimize_period_for_order(costs, placed.schedule(), period)
            assert early.times.keys() == placed.times.keys()
    assert done > 200


@pytest.mark.parametrize("speeds", [(1, 1, 1), (1, 2, 0.5)])
def test_overload_is_the_load_beyond_the_period(speeds: tuple[float, ...]) -> None:
    """Of GPUs of any speed, with overhead, for all copies; a schedule has none."""
    random, over = Random(6), 0
    for _ in range(200):
        equal = random_costs(random, "exact", 3)
        gpus = tuple(
            gpu.model_copy(update={"speed": float(speed)})
            for gpu, speed in zip(equal.cluster.gpus, speeds, strict=True)
        )
        costs = replace(
            equal,
            cluster=equal.cluster.model_copy(update={"gpus": gpus, "action_overhead_ns": 1}),
        )
        runs, k = random_runs(random, costs), random.choice((1, 2, 3))
        period = random.randint(1, k * costs.load_ns(0, costs.layers - 1, 2))
        loads = Counter[int]()
        for first, last, gpu in runs:
            loads[gpu] += k * costs.load_ns(first, last, gpu)
        beyond = sum(max(0, load - period) for load in loads.values())
        assert overload(costs, runs, period, k) == beyond / period
        over += beyond > 0
        centres = [copy * period // k for copy in range(k)]
        assert not (beyond and ModuloListScheduler(costs, runs, period, centres).place())
    assert 20 < over < 200


def test_a_stage_waits_as_long_as_it_is_told() -> None:
    """F ends, and B begins, so far apart from what the next stage does; all else as without."""
    costs = CostModel(handmade.chain([(2, 2), (3, 3)]), uniform(2, 100), "2bw", "exact")
    placed = ModuloListScheduler(costs, [(0, 0, 0), (1, 1, 1)], 20, waits={0: (4, 5)})
    assert placed.place()
    times = placed.schedule().times
    first, second = times[OpKind.F, 1][0], times[OpKind.B, 1][0]
    assert second - first == 3
    assert first - (times[OpKind.F, 0][0] + 2) == 4
    assert times[OpKind.B, 0][0] - (second + 3) == 5


def test_waits_are_of_stages_that_are_there() -> None:
    """Shares become ns of the stage that begins with the layer; a layer inside has none."""
    layout = Allocation((0, 0, 1), frozenset(), waits={1: (0.5, 0.0), 2: (0.25, 0.5)})
    assert layout.waits_by_stage(20) == {1: (5, 10)}


def test_one_stage_a_gpu_equals_the_dynamic_program() -> None:
    """At its period the contiguous optimum's partition keeps as many micro-batches as it says."""
    random = Random(6)
    for _ in range(100):
        costs = random_costs(random, "exact", 3)
        period = random.randint(20, 120)
        partition = ContiguousDP(costs).solve(period)
        if partition is None:
            continue
        runs = [(stage.first, stage.last, stage.gpu) for stage in partition.stages]
        placed = ModuloListScheduler(costs, runs, period)
        assert placed.place()
        schedule = placed.schedule()
        counts = [-(-span // period) for span in partition.spans]
        for stage, count in enumerate(counts):
            first, last, gpu = runs[stage]
            times = schedule.times
            span = times[OpKind.B, stage][0] + costs.backward_ns(first, last, gpu)
            span -= times[OpKind.F, stage][0]
            assert -(-span // period) == count


def test_glance_is_near_the_exact_bytes() -> None:
    """Bytes at a glance never exceed the exact peak, and mostly equal it."""
    random = Random(7)
    equal = total = 0
    models: tuple[MemoryModel, ...] = ("exact", "paper")
    for turn in range(300):
        costs = random_costs(random, models[turn % 2], 3)
        runs = random_runs(random, costs)
        placed = ModuloListScheduler(costs, runs, costs.load_ns(0, costs.layers - 1, 0))
        if not placed.place():
            continue
        rows = memory_rows(costs, placed.schedule())
        near = placed.peaks()
        for row, peak in zip(rows, near, strict=True):
            assert peak <= row.peak_bytes
            total += 1
            equal += peak == row.peak_bytes
    assert equal > 0.8 * total > 400


def test_walk_leaves_contiguity_where_that_helps() -> None:
    """Loads 1, 2, 1 on two GPUs: annealing finds the middle alone, the ends together."""
    chain = handmade.chain([(1, 1), (2, 2), (1, 1)], [{}, {}, {}])
    costs = CostModel(chain, uniform(2, 100), "2bw", "exact")
    options = limits()
    state = Incumbent(costs, options)
    state.raise_bound("any", Fraction(4))
    contiguous(state)
    assert state.contiguous == 6
    SimulatedAnnealing(state).run(10)
    assert state.best is not None
    assert state.best.per_microbatch == 4
    assert {stage.gpu for stage in state.best.stages} == {0, 1}


def test_a_step_counts_for_its_list_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where work is counted: for each stage it places, not for looks at the clock."""
    times = [(1 + i % 3, 2 + i % 2) for i in range(10)]
    sizes = [{"saved_bytes": 4}] * 10
    costs = CostModel(handmade.chain(times, sizes), uniform(3, 34), "2bw", "exact")
    state = Incumbent(costs, limits(clock=DeterministicClock()))
    state.raise_bound("any", Fraction(1))
    contiguous(state)
    best = state.best
    assert best is not None
    walked: list[tuple[int, int]] = []
    run = AllocationWalk.run

    def counted(self: AllocationWalk, heats: Floats) -> tuple[int, int]:
        walked.append(run(self, heats))
        return walked[-1]

    monkeypatch.setattr(AllocationWalk, "run", counted)
    begun = state.options.clock.spent
    target = best.per_microbatch * Fraction(9, 10)
    SimulatedAnnealing(state).anneal_from(Allocation.of(best, 1), target, 200, 10.0)
    used = state.options.clock.spent - begun
    steps, placed = map(sum, zip(*walked, strict=True))
    assert steps == 200
    assert placed > 100
    assert 200 * STEP_S + placed * PLACED_S < used
    judged = JUDGED_S + 10 * PLACED_S
    assert used < 200 * STEP_S + placed * PLACED_S + (len(walked) + 2) * judged
