"""Folds and loops: orders of GPUs, borders that fit, plans of equal blocks on scarce memory."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np

from pipeplan.cluster import Cluster, Gpu, uniform
from pipeplan.ilp.bounds.assignment import serial_schedule
from pipeplan.ilp.bounds.load import closed_form_bound
from pipeplan.ilp.clock import DeterministicClock
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.local_search.annealing import SimulatedAnnealing
from pipeplan.ilp.local_search.interleaved_starts import (
    STEPS,
    InterleavedStarts,
    random_visits,
)
from pipeplan.ilp.local_search.visit_cuts import VisitCuts
from pipeplan.ilp.search import contiguous
from tests import handmade
from tests.searches import limits

BLOCKS = 12
GPUS = 4


def blocks(cluster: Cluster, pins: tuple[tuple[int, int], ...] = ()) -> CostModel:
    """Equal blocks of 30 ns that keep 10 bytes each; no transfer takes time."""
    chain = handmade.chain([(10, 20)] * BLOCKS, [{"saved_bytes": 10}] * BLOCKS)
    return CostModel(chain, cluster, "2bw", "exact", pins=pins)


def searched(costs: CostModel, seconds: float, seed: int = 0) -> tuple[Incumbent, Incumbent]:
    """The contiguous optimum, and what folds make of it in so much work."""
    known, state = (
        Incumbent(costs, limits(time_limit_s=60, clock=DeterministicClock(), seed=seed))
        for _ in range(2)
    )
    for each in (known, state):
        each.raise_bound("any", closed_form_bound(costs))
        contiguous(each)
    InterleavedStarts(state, SimulatedAnnealing(state)).run(seconds)
    return known, state


def test_orders_visit_every_gpu_first() -> None:
    """All GPUs once in order, then the same again or backwards, and nothing else."""
    random, gpus = Random(1), [2, 0, 1, 3]
    found = [random_visits(gpus, random) for _ in range(300)]
    loops, folds = gpus * 4, (gpus + gpus[::-1]) * 2
    for order in found:
        assert len(order) > len(gpus)
        assert order in (loops[: len(order)], folds[: len(order)])
    assert {len(order) for order in found} == set(range(5, 17))
    assert any(order[4] == 2 for order in found)
    assert any(order[4] == 3 for order in found)


def test_borders_rise_and_cover_the_chain() -> None:
    """Whatever is drawn, every layer has one home, visits come in order; mostly it gets better."""
    random, draws, worst = Random(2), np.random.default_rng(2), list[float]()
    for _ in range(40):
        costs = blocks(uniform(GPUS, random.randint(60, 400)))
        order = random_visits(range(GPUS), random)
        borders = VisitCuts(costs, order, random.randint(60, 150), random.choice((1.0, 1.2)))
        before = borders.excess
        borders.anneal(draws, 60)
        starts = borders.starts
        assert starts[0] == 0
        assert all(0 <= one <= other <= BLOCKS for one, other in pairwise(starts))
        assert len(borders.homes) == BLOCKS
        visits = zip(order, pairwise([*starts, BLOCKS]), strict=True)
        assert list(borders.homes) == [
            gpu for gpu, (first, end) in visits for _ in range(first, end)
        ]
        worst.append(borders.excess - before)
    assert max(worst) < 0.2
    assert min(worst) < -0.2


def test_excess_is_what_is_beyond() -> None:
    """By hand: six blocks, 180 ns, 60 bytes on each of two GPUs, on the first for two periods."""
    costs = blocks(uniform(2, 10**6))
    borders = VisitCuts(costs, [0, 1], 150, 1.0)
    assert borders.starts == [0, 6]
    assert abs(borders.excess - 3 * 2 * (180 / 150 - 1)) < 1e-9
    tight = VisitCuts(blocks(uniform(2, 100)), [0, 1], 180, 1.0)
    kept = [60 * (2 + 0.3), 60 * (1 + 0.3)]
    assert abs(tight.excess - (kept[0] / 100 - 1)) < 1e-9


def test_annealing_finds_borders_that_fit() -> None:
    """Two blocks on each of six visits are four on two GPUs, too many: all end with three."""
    costs = blocks(uniform(GPUS, 95))
    borders = VisitCuts(costs, [0, 1, 2, 3, 0, 1], 110, 1.0)
    assert borders.excess > 0
    borders.anneal(np.random.default_rng(3), max(STEPS))
    assert borders.excess == 0
    assert [borders.homes.count(gpu) for gpu in range(GPUS)] == [3] * GPUS


def test_folds_reach_the_bound_on_equal_blocks() -> None:
    """Three blocks a GPU in 90 ns where the best contiguous plan has four on one of them.

    Five of six searches of 8 s get there: the first of three that does counts.
    """
    for budget in (90, 100, 110):
        for seed in range(3):
            known, state = searched(blocks(uniform(GPUS, budget)), 8, seed)
            if state.best is not None and state.best.period == 90:
                break
        assert known.best is not None
        assert state.best is not None
        assert known.best.period == 120
        assert state.best.period == 90
        assert len(state.best.stages) > GPUS
        assert state.is_feasible(state.best)


def test_pinned_layers_stay_on_unequal_gpus() -> None:
    """From a plan of one micro-batch at a time; both ends are pinned to one GPU."""
    gpus = ((120, 1.0), (60, 0.5), (90, 1.0), (100, 2.0))
    cluster = Cluster(
        gpus=tuple(
            Gpu(name=f"gpu{n}", memory_bytes=size, speed=speed)
            for n, (size, speed) in enumerate(gpus)
        )
    )
    costs = blocks(cluster, ((0, 3), (11, 3)))
    state = Incumbent(costs, limits(time_limit_s=60, clock=DeterministicClock()))
    state.raise_bound("any", closed_form_bound(costs))
    serially = serial_schedule(costs, (3, 0, 0, 0, 0, 1, 2, 2, 2, 2, 3, 3))
    assert state.offer(serially)
    InterleavedStarts(state, SimulatedAnnealing(state)).run(0.5)
    assert state.best is not None
    assert state.best.period < serially.period / 2
    assert {stage.gpu for stage in (state.best.stages[0], state.best.stages[-1])} == {3}
    assert state.is_feasible(state.best)


def test_folds_end_where_nothing_is_to_be_found() -> None:
    """Without a plan, on one GPU, or where the bound is reached, nothing is tried."""
    for costs, planned in ((blocks(uniform(4, 90)), False), (blocks(uniform(1, 10**6)), True)):
        state = Incumbent(costs, limits(time_limit_s=60, clock=DeterministicClock()))
        state.raise_bound("any", closed_form_bound(costs))
        if planned:
            contiguous(state)
        phase = state.phase
        InterleavedStarts(state, SimulatedAnnealing(state)).run(5)
        assert state.phase == phase
    known, state = searched(blocks(uniform(GPUS, 110)), 8, 1)
    walk = SimulatedAnnealing(state)
    starts = InterleavedStarts(state, walk)
    draws = repr((walk.draws.bit_generator.state, starts.random.getstate()))
    state.best, found = known.best, state.best
    assert found is not None
    assert state.offer(found)
    assert state.done
    starts.run(5)
    assert repr((walk.draws.bit_generator.state, starts.random.getstate())) == draws
