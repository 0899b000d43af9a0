"""The examples of paper 002, section 4, found and proven by the planner itself.

Beaumont, Eyraud-Dubois, Shilova, "Pipelined Model Parallelism" (2020). The paper gives one time
per layer for F and B together, or the same for each; here each of F and B lasts that time, so
periods are twice the paper's where it adds them up. Memory counts saved bytes only: boundaries are
empty and `saved_bytes` is the size of the layer's activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import pytest

from pipeplan import planner
from pipeplan.chain import Chain
from pipeplan.cluster import uniform
from pipeplan.errors import InfeasibleError
from pipeplan.plan import Plan
from tests import grids, handmade


def chain(costs: Sequence[int], **bytes_per_layer: Sequence[int]) -> Chain:
    """A chain with F = B = cost, and one size per layer for each field given."""
    fields = [
        {name: sizes[i] for name, sizes in bytes_per_layer.items()} for i in range(len(costs))
    ]
    return handmade.chain([(cost, cost) for cost in costs], fields)


def solve(of: Chain, gpus: int, memory: int, **options: Any) -> Plan:
    """The planner's answer, one search thread."""
    config = planner.Config(time_limit_s=30, workers=1, **options)
    return planner.solve(of, uniform(gpus, memory), config)


def proven(plan: Plan) -> tuple[int, bool, Fraction | None]:
    """Period of the plan, whether it is proven, period of the best contiguous plan."""
    beside = plan.solver.contiguous_period_ns
    optimal = plan.solver.status == "optimal"
    return plan.period_ns, optimal, Fraction(*beside) if beside else None


def test_chain_121() -> None:
    """Section 4.2.1: (1,2,1) on 2 GPUs takes 2, contiguous 3 (here doubled), both proven."""
    of = chain([1, 2, 1])
    assert proven(solve(of, 2, 100, k=1)) == (4, True, 6)
    assert proven(solve(of, 2, 100, k=1, method="contiguous")) == (6, True, 6)


def theorem_1(k: int) -> Chain:
    """C_k, times 2k + 1 so that epsilon is 1."""
    whole = 2 * k + 1
    costs = [k * whole, 1, (k - 1) * whole, 1] * k
    return chain([*costs, k * whole, *[1] * ((k - 2) * whole + 1), whole])


@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_theorem_1(k: int) -> None:
    """C_k on 2k + 1 GPUs: k without and 2k - 1 + epsilon with contiguity, both proven."""
    whole = 2 * k + 1
    plan = solve(theorem_1(k), whole, 100, k=1)
    assert proven(plan) == (2 * k * whole, True, 2 * ((2 * k - 1) * whole + 1))
    bound = plan.solver.bounds.contiguous
    assert bound is not None
    assert Fraction(*bound) == 2 * ((2 * k - 1) * whole + 1)


def test_lemma_2() -> None:
    """Weights 1, 2, 1 on two GPUs of memory 2: only a non-contiguous plan exists."""
    of = chain([1, 1, 1], weight_bytes=[1, 2, 1])
    assert proven(solve(of, 2, 4, k=1)) == (4, True, None)
    with pytest.raises(InfeasibleError, match="no contiguous plan exists"):
        solve(of, 2, 4, k=1, method="contiguous")


@grids.first(1, gpus=[3, 4])
def test_lemma_3(gpus: int) -> None:
    """Figure 3: A + 1 without, P * A with contiguity, both proven."""
    heavy, memory = 20, 10
    weights = [memory - 1] * gpus + [memory] + [1] * gpus
    of = chain([1] * gpus + [heavy] * (gpus + 1), weight_bytes=weights)
    plan = solve(of, gpus + 2, 2 * memory, k=1)
    assert proven(plan) == (2 * (heavy + 1), True, 2 * gpus * heavy)
    bound = plan.solver.bounds.contiguous
    assert bound is not None
    assert Fraction(*bound) == 2 * gpus * heavy


def test_figure_4() -> None:
    """(3,2,2,2), memory 4 on 4 GPUs: the best 1F1B takes 8, 2F2B 12 for two, both proven."""
    of = chain([3, 2, 2, 2], saved_bytes=[1, 2, 2, 4])
    one, two = solve(of, 4, 4, k=1), solve(of, 4, 4, k=2)
    assert proven(one)[:2] == (8, True)
    assert one.solver.gap_bound == "k1"
    assert (two.k, *proven(two)[:2]) == (2, 12, True)
    assert solve(of, 4, 4, k="auto").period_per_microbatch == 6


def test_figure_5() -> None:
    """(1,2,1), memory 6 on 2 GPUs: the best 1F1B takes 5, 2F2B 8 for two, both proven."""
    of = chain([1, 2, 1], saved_bytes=[2, 3, 2])
    one, two = solve(of, 2, 6, k=1), solve(of, 2, 6, k=2)
    assert proven(one)[:2] == (5, True)
    assert (two.k, *proven(two)[:2]) == (2, 8, True)
    assert proven(solve(of, 2, 8, k=1))[:2] == (4, True)
