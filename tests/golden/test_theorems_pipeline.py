"""Theorems 1 to 3 of paper 002, from both sides.

Beaumont, Eyraud-Dubois, Shilova, "Pipelined Model Parallelism" (2020). A reduction is built as the
paper builds it. From a solution of the partition problem follows a plan, which verifier and
simulator judge; from a plan that the planner finds follows a solution; and where there is no
solution, the planner proves that there is no plan. That C_k of Theorem 1 reaches its ratio is
tested in test_paper_examples_planner.py and test_paper_examples_verifier.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from pipeplan import simulator
from pipeplan.chain import Chain
from pipeplan.cluster import uniform
from pipeplan.lowering import lower
from pipeplan.plan import OpKind, Plan
from pipeplan.verifier import verify
from tests import handmade
from tests.golden.test_paper_examples_planner import chain, proven, solve
from tests.golden.test_paper_examples_verifier import contiguous
from tests.partitions import NO, YES, is_three_partition, target, three_partition

Stages = list[tuple[int, int, int]]
Task = tuple[OpKind, int]
INSTANCES = [*YES.values(), *NO.values()]


def assert_right(plan: Plan) -> None:
    """Verifier and simulator accept the plan."""
    assert verify(plan) == ()
    assert simulator.check(plan, lower(plan)).period_ns == plan.period_ns


def singles(home: Sequence[int]) -> Stages:
    """A stage per layer, on the GPUs of `home`."""
    return [(layer, layer, gpu) for layer, gpu in enumerate(home)]


# --- Theorem 1: the best contiguous plan takes at most twice as long ----------------------------


@pytest.mark.parametrize("seed", range(12))
def test_contiguous_takes_at_most_twice_as_long(seed: int) -> None:
    """T* is the best load over all allocations; Next Fit keeps 2 T* with no more GPUs."""
    draw = random.Random(seed)
    gpus, layers = draw.choice([(2, 5), (2, 6), (3, 6), (3, 7)])
    costs = [draw.choice([1, 1, 2, 5, 9, draw.randint(1, 20)]) for _ in range(layers)]
    best = min(
        max(sum(cost for cost, at in zip(costs, home, strict=True) if at == gpu) for gpu in home)
        for home in product(range(gpus), repeat=layers)
    )
    period, optimal, apart = proven(solve(chain(costs), gpus, 100, k=1))
    assert (period, optimal) == (2 * best, True)
    assert apart is not None
    assert period <= apart <= 2 * period

    stages = contiguous(costs, 2 * best)
    assert len(stages) <= gpus
    assert_right(handmade.packed(chain(costs), stages, 2 * period, cluster=uniform(gpus, 100)))


# --- Theorem 2: which layer goes where is 3-partition -------------------------------------------


@pytest.mark.parametrize("values", INSTANCES)
def test_a_period_of_v_is_a_three_partition(values: Sequence[int]) -> None:
    """3m layers of forward u_l on m GPUs: period V if and only if there is a 3-partition."""
    v, parts = target(values), three_partition(values)
    of = handmade.chain([(value, 0) for value in values])
    gpus = len(values) // 3
    if parts is not None:
        home = [next(gpu for gpu, part in enumerate(parts) if i in part) for i in range(3 * gpus)]
        assert_right(handmade.packed(of, singles(home), v, microbatches=1000))

    plan = solve(of, gpus, 1, k=1)
    assert plan.solver.status == "optimal"
    assert (plan.period_ns == v) == (parts is not None)
    if parts is not None:
        assert is_three_partition(values, layers_by_gpu(plan))


def layers_by_gpu(plan: Plan) -> list[list[int]]:
    """The layers of each GPU."""
    return [
        [layer for stage in plan.hosted(gpu) for layer in range(stage.first, stage.last + 1)]
        for gpu in range(len(plan.cluster.gpus))
    ]


def test_numbers_outside_the_window_need_no_triples() -> None:
    """(6, 2, 1, 1, 1, 1) has period V = 6, but no two triples that add up to 6."""
    plan = solve(handmade.chain([(value, 0) for value in (6, 2, 1, 1, 1, 1)]), 2, 1, k=1)
    assert plan.period_ns == 6
    assert sorted(map(len, layers_by_gpu(plan))) == [1, 5]


# --- Theorem 3: when each layer runs is 3-partition, too ----------------------------------------


def fixed(values: Sequence[int]) -> tuple[Chain, list[int]]:
    """The chain of 6m layers, and each layer's GPU: P1 is GPU 0, P2 is GPU 1.

    T_1..T_m last V, T_(m+1)..T_4m the u, and the last 2m, which go to and fro between the GPUs,
    V each; only these keep anything: one byte. All backwards take no time.
    """
    v, m = target(values), len(values) // 3
    forward = [v] * m + [*values] + [v] * 2 * m
    kept = [{}] * 4 * m + [{"saved_bytes": 1}] * 2 * m
    return handmade.chain([(time, 0) for time in forward], kept), [1] * m + [0] * 3 * m + [
        1,
        0,
    ] * m


@pytest.mark.parametrize("values", YES.values())
def test_a_three_partition_gives_the_schedule_of_figure_7(values: Sequence[int]) -> None:
    """It takes 2mV, no GPU is ever idle, and both peaks are the m bytes there are."""
    of, home = fixed(values)
    parts = three_partition(values)
    assert parts is not None
    built = figure_7(of, home, values, parts)
    assert_right(built)
    assert [row.peak_bytes for row in built.memory] == [len(parts)] * 2


@pytest.mark.parametrize(
    "values",
    [
        YES["two triples of 15"],
        YES["two triples of 13"],
        NO["even numbers, odd target"],
        pytest.param(NO["five of 4 and a 6"], marks=pytest.mark.long),
    ],
)
def test_a_schedule_of_a_fixed_allocation_is_a_three_partition(values: Sequence[int]) -> None:
    """With m bytes a GPU and all layers pinned: period 2mV if and only if there is one.

    With memory enough the last 2m layers need not run in one go, and any order will do.
    """
    of, home = fixed(values)
    v, m, parts = target(values), len(values) // 3, three_partition(values)
    options: dict[str, Any] = {"k": 1, "pins": dict(enumerate(home)), "deterministic": True}
    plan = solve(of, 2, m, **options)
    assert plan.solver.status == "optimal"
    assert (plan.period_ns == 2 * m * v) == (parts is not None)
    if parts is not None:
        assert is_three_partition(values, [[i - m for i in hole] for hole in holes(plan, m)])
    assert solve(of, 2, 100 * m, **options).period_ns == 2 * m * v


def figure_7(
    of: Chain, home: Sequence[int], values: Sequence[int], parts: Sequence[Sequence[int]]
) -> Plan:
    """The last 2m layers one after the other; in the holes T_1..T_m on GPU 1, triples on GPU 0."""
    v, m = target(values), len(parts)
    places = [(2 * i + 1) * v for i in range(m)] + [0] * 3 * m + [i * v for i in range(2 * m)]
    for hole, part in enumerate(parts):
        for place, i in enumerate(part):
            places[m + i] = 2 * hole * v + sum(values[j] for j in part[:place])
    return placed(of, singles(home), 2 * m * v, places, cluster=uniform(2, m), microbatches=1000)


def compute_order(stages: Stages) -> list[Task]:
    """T_1..T_2L."""
    return [task for task in handmade.order(stages) if task[0].is_compute]


def placed(
    of: Chain, stages: Stages, period: int, places: Sequence[int], back: int = 0, **fields: Any
) -> Plan:
    """The plan whose forwards take these places of the period, its backwards place `back`."""
    times, ready = {}, 0
    for kind, stage in compute_order(stages):
        place = places[stage] if kind is OpKind.F else back
        begin = ready + (place - ready) % period
        times[f"{stage}{kind}0"] = begin
        ready = begin + (of.layers[stage].forward_ns if kind is OpKind.F else 0)
    return handmade.plan(of, stages, period, times, **fields)


def holes(plan: Plan, m: int) -> list[list[int]]:
    """The layers that GPU 0 runs between two of the last 2m layers, hole by hole."""
    ops = sorted(
        (op.start_ns, plan.stages[op.stage])
        for op in plan.ops
        if op.kind is OpKind.F and op.gpu == 0
    )
    found: list[list[int]] = [[]]
    for _, stage in ops:
        if stage.first >= 4 * m:
            found.append([])
        else:
            found[-1] += range(stage.first, stage.last + 1)
    return [*found[1:-1], found[-1] + found[0]]
