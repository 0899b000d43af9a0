"""Micro-batches in a row: what they prove of contiguous plans, and that no plan is refuted."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from itertools import combinations, pairwise, product
from math import ceil
from random import Random

import pytest
from ortools.sat.python import cp_model

from pipeplan.chain import Chain, Layer
from pipeplan.cluster import Cluster, uniform
from pipeplan.ilp.bounds.load import closed_form_bound
from pipeplan.ilp.bounds.window import FiniteWindow, LimitedPartition, raise_bound, suited
from pipeplan.ilp.contiguous.in_flight_limits import max_in_flight
from pipeplan.ilp.contiguous.kfkb_search import KFkBSearch
from pipeplan.ilp.contiguous.steady_states import steps_of
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.cpsat.solve import configured, run
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.memory import fits, memory_rows
from pipeplan.ilp.schedule import Schedule, chain_ops
from pipeplan.ilp.search import contiguous
from pipeplan.plan import MemoryModel, Stage
from pipeplan.planner import Config, solve
from pipeplan.self_timed import Order, eager_cycle
from tests.searches import limits

ORDERS: tuple[Order, ...] = ("alternate", "backward", "strict")


def _chain() -> Chain:
    """Heavy early bytes, slow boundaries: GPU 0 has room for two micro-batches of layer 0."""
    rows = ((81, 154, 336, 41), (44, 101, 205, 20), (108, 183, 240, 1))
    return Chain(
        name="scarce",
        layers=tuple(
            Layer(name=str(i), forward_ns=f, backward_ns=b, saved_bytes=s, output_bytes=o)
            for i, (f, b, s, o) in enumerate(rows)
        ),
        input_bytes=8,
    )


def _cluster(memory: int, gpus: int = 3) -> Cluster:
    return uniform(gpus, memory, bandwidth_bytes_per_s=12 * 10**8, duplex="half")


def _state(costs: CostModel) -> Incumbent:
    options = limits(
        ks=(1, 2, 3), contiguous_only=True, time_limit_s=30.0, deterministic=True, workers=2
    )
    state = Incumbent(costs, options)
    state.raise_bound("any", closed_form_bound(costs))
    contiguous(state)
    KFkBSearch(state).run(5.0)
    return state


@cache
def _by_sums() -> tuple[Incumbent, Fraction]:
    """A search whose bound windows may raise, and what sums prove."""
    state = _state(CostModel(_chain(), _cluster(960), "2bw", "paper"))
    return state, state.bounds["contiguous"]


def test_a_bound_that_sums_do_not_see() -> None:
    """Where a half-duplex link and a GPU are asked for at once, windows prove more than sums."""
    state, before = _by_sums()
    raise_bound(state, 20.0)
    assert state.contiguous is not None
    assert before < state.bounds["contiguous"] <= state.contiguous


def test_the_gap_of_contiguous_plans_uses_it() -> None:
    """A plan of the contiguous method carries a bound that sums alone do not prove."""
    _, before = _by_sums()
    config = Config(
        time_limit_s=20.0, memory_model="paper", method="contiguous", deterministic=True
    )
    plan = solve(_chain(), _cluster(960), config)
    assert plan.solver.bounds.contiguous is not None
    assert Fraction(*plan.solver.bounds.contiguous) > before


@pytest.mark.parametrize("model", ["exact", "paper"])
def test_no_schedule_that_fits_is_refuted(model: MemoryModel) -> None:
    """At the period of any eager cycle that fits, its partition's windows have a solution."""
    random, met = Random(5), 0
    for _ in range(3):
        costs = _random_costs(random, model)
        for stages in _partitions(costs.layers, costs.gpus):
            caps = tuple(max_in_flight(costs, stage, None) for stage in stages)
            period = _shortest(costs, stages)
            if period is None:
                continue
            assert 0 not in caps, "a schedule fits"
            for window in FiniteWindow.of(costs, LimitedPartition(stages, caps)):
                met += 1
                assert not _refuted(window, period)
    assert met > 6


def test_partitions_that_matter_are_all_there() -> None:
    """Each partition whose eager cycle is below a period is among those below it."""
    random, met = Random(6), 0
    for _ in range(8):
        costs = _random_costs(random, "exact")
        below = Fraction(costs.load_ns(0, costs.layers - 1, 0) * 2, 3)
        found = suited(costs, below)
        assert found is not None
        known = {pipeline.stages: floor for floor, pipeline in found}
        for stages in _partitions(costs.layers, costs.gpus):
            period = _shortest(costs, stages)
            if period is not None and period < below:
                met += 1
                assert known[stages] <= period
    assert met > 10


def _refuted(window: FiniteWindow, period: Fraction) -> bool:
    solver = configured(limits(), 1.0)
    deadline = ceil(period * window.count) // window.tick
    return run(solver, window.model(deadline)) == cp_model.INFEASIBLE


def _shortest(costs: CostModel, stages: tuple[Stage, ...]) -> Fraction | None:
    """The shortest period of an eager cycle that fits, over caps of up to three."""
    steps, best = steps_of(costs, stages), None
    for caps in product((1, 2, 3), repeat=len(stages)):
        for order in ORDERS:
            cycle = eager_cycle(steps, caps, order, microbatches=24)
            if cycle is None:
                continue
            times = dict(zip(chain_ops(stages), cycle.times, strict=True))
            schedule = Schedule(stages, cycle.period, cycle.k, times)
            shorter = best is None or schedule.per_microbatch < best
            if shorter and fits(memory_rows(costs, schedule)):
                best = schedule.per_microbatch
    return best


def _random_costs(random: Random, model: MemoryModel) -> CostModel:
    """Four layers on three GPUs, memory for one to three micro-batches."""
    layers = tuple(
        Layer(
            name=str(index),
            forward_ns=random.randint(0, 9),
            backward_ns=random.randint(1, 12),
            weight_bytes=random.randint(0, 2),
            saved_bytes=random.randint(0, 4),
            saved_input_bytes=random.randint(0, 3),
            output_bytes=random.randint(3, 6),
        )
        for index in range(4)
    )
    chain = Chain(name="random", input_bytes=3, layers=layers)
    memory = random.randint(14, 40)
    return CostModel(chain, _cluster(memory), "2bw", model)


def _partitions(layers: int, gpus: int) -> list[tuple[Stage, ...]]:
    return [
        tuple(
            Stage(id=i, layers=(a, b - 1), gpu=i)
            for i, (a, b) in enumerate(pairwise([0, *cuts, layers]))
        )
        for number in range(gpus)
        for cuts in combinations(range(1, layers), number)
    ]
