"""The examples of paper 002: the planner finds the paper's periods and proves them.

Beaumont, Eyraud-Dubois, Shilova, "Pipelined Model Parallelism" (2020), section 4. The paper gives
one time per layer for F and B together, or the same for each; here each of F and B lasts that
time. Two weight versions double the weights, so memories are doubled where weights count.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import pytest

from pipeplan.chain import Chain
from pipeplan.cluster import uniform
from pipeplan.plan import Plan
from pipeplan.planner import Config, solve
from tests import handmade


def planned(
    costs: Sequence[int],
    gpus: int,
    memory: int,
    *,
    k: int | None = None,
    **bytes_per_layer: Sequence[int],
) -> Plan:
    """The plan for a chain with F = B = cost and one size per layer for each field given."""
    fields = [
        {name: sizes[i] for name, sizes in bytes_per_layer.items()} for i in range(len(costs))
    ]
    chain: Chain = handmade.chain([(cost, cost) for cost in costs], fields)
    config = Config(time_limit_s=30.0, workers=1, k=k or "auto")
    return solve(chain, uniform(gpus, memory), config)


def contiguous_period(plan: Plan) -> Fraction:
    """The best contiguous plan's period per micro-batch."""
    assert plan.solver.contiguous_period_ns is not None
    return Fraction(*plan.solver.contiguous_period_ns)


def theorem_one(k: int) -> list[int]:
    """Layers of C_k in units of e = 1 / (2k + 1)."""
    unit = 2 * k + 1
    part = [k * unit, 1, (k - 1) * unit, 1]
    return part * k + [k * unit] + [1] * ((k - 2) * unit + 1) + [unit]


def test_chain_121() -> None:
    """Section 4.2.1: period 2 where contiguous plans take 3 (doubled: 4 and 6), proven."""
    plan = planned([1, 2, 1], 2, 100)
    assert (plan.period_ns, plan.solver.status) == (4, "optimal")
    assert contiguous_period(plan) == 6


@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_theorem_one(k: int) -> None:
    """C_k on 2k + 1 GPUs: k, proven; contiguous 2k - 1 + e (in units of e, doubled)."""
    unit = 2 * k + 1
    plan = planned(theorem_one(k), unit, 100)
    assert plan.solver.status == "optimal"
    assert plan.period_per_microbatch == 2 * k * unit
    assert contiguous_period(plan) == 2 * ((2 * k - 1) * unit + 1)


def test_lemma_two() -> None:
    """Weights (1, 2, 1) and memory 2: only the outer layers fit together; period 2 (doubled)."""
    plan = planned([1, 1, 1], 2, 4, weight_bytes=[1, 2, 1])
    assert plan.solver.status == "optimal"
    assert plan.period_per_microbatch == 4
    assert plan.solver.contiguous_period_ns is None
    gpus = {stage.first: stage.gpu for stage in plan.stages}
    assert gpus[0] == gpus[2] != gpus[1]


@pytest.mark.parametrize("count", [3, 4])
def test_lemma_three(count: int) -> None:
    """Figure 3 with A = 5, M = 10: A + 1 where contiguous plans take P * A (doubled).

    A + 1 is proven for 1F1B.
    """
    heavy, memory = 5, 10
    plan = planned(
        [1] * count + [heavy] + [heavy] * count,
        count + 2,
        2 * memory,
        weight_bytes=[memory - 1] * count + [memory] + [1] * count,
    )
    assert plan.period_per_microbatch == 2 * (heavy + 1)
    assert plan.solver.bounds.k1 == (2 * (heavy + 1), 1)
    assert contiguous_period(plan) == 2 * count * heavy


@pytest.mark.parametrize(("k", "period"), [(1, 8), (2, 12)])
def test_figure_four(k: int, period: int) -> None:
    """Durations 3, 2, 2, 2, memory 4: best 1F1B 8, best 2F2B 12 for two; both proven."""
    plan = planned([3, 2, 2, 2], 4, 4, k=k, saved_bytes=[1, 2, 2, 4])
    assert (plan.period_ns, plan.solver.status) == (period, "optimal")


@pytest.mark.parametrize(("k", "period"), [(1, 5), (2, 8)])
def test_figure_five(k: int, period: int) -> None:
    """Durations 1, 2, 1, memory 6: best 1F1B 5, best 2F2B 8 for two; both proven."""
    plan = planned([1, 2, 1], 2, 6, k=k, saved_bytes=[2, 3, 2])
    assert (plan.period_ns, plan.solver.status) == (period, "optimal")


def test_auto_k_prefers_two_where_it_pays() -> None:
    """Without a fixed k the planner finds that two micro-batches a period beat one (Figure 4)."""
    plan = planned([3, 2, 2, 2], 4, 4, saved_bytes=[1, 2, 2, 4])
    assert plan.period_per_microbatch == 6
    assert plan.solver.status == "optimal"
