"""Pinned layers held against brute force: the optimum with pins, proven, or that there is none."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeplan import planner
from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.errors import InfeasibleError
from pipeplan.plan import Plan
from tests import oracle
from tests.property.test_planner_oracle import chains, clusters, value

CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]


@st.composite
def pinned(draw: st.DrawFn, *, equal: bool) -> tuple[Chain, Cluster, dict[int, int]]:
    """Up to four layers on up to three GPUs, one or two of the layers pinned."""
    chain = draw(chains(4, st.integers(1, 2), messages=False))
    cluster = draw(clusters(3, equal=equal, messages=False))
    layers = st.integers(0, len(chain.layers) - 1)
    gpus = st.integers(0, len(cluster.gpus) - 1)
    return chain, cluster, draw(st.dictionaries(layers, gpus, min_size=1, max_size=2))


def solved(chain: Chain, cluster: Cluster, pins: dict[int, int], **options: Any) -> Plan | None:
    """The planner's plan; None where it proves that there is none."""
    limits: dict[str, Any] = {"time_limit_s": 4, "workers": 1, "deterministic": True}
    config = planner.Config(pins=dict(pins), microbatches=64, **limits | options)
    try:
        return planner.solve(chain, cluster, config)
    except InfeasibleError:
        return None


def keeps(plan: Plan, pins: dict[int, int]) -> bool:
    """Whether each pinned layer sits on its GPU."""
    homes = {n: s.gpu for s in plan.stages for n in range(s.first, s.last + 1)}
    return all(homes[layer] == gpu for layer, gpu in pins.items())


def held_against(
    chain: Chain, cluster: Cluster, pins: dict[int, int], *, contiguous: bool = False
) -> Plan | None:
    """Compare with brute force: feasibility, the period, bounds, `optimal`."""
    limit = oracle.serial(chain, cluster)
    best = oracle.optimum(chain, cluster, limit=limit, pins=pins, contiguous=contiguous)
    plan = solved(chain, cluster, pins, k=1, method="contiguous" if contiguous else "auto")
    assert (plan is None) == (best is None)
    if plan is None or best is None:
        return None
    assert keeps(plan, pins)
    assert plan.solver.pins == tuple(sorted(pins.items()))
    assert plan.period_ns >= best
    assert value(plan.solver.bounds.any) <= best
    assert plan.solver.status != "optimal" or plan.period_ns == best
    return plan


@settings(max_examples=35, derandomize=True, deadline=None, suppress_health_check=CHECKS)
@given(pinned(equal=True))
def test_equal_gpus(instance: tuple[Chain, Cluster, dict[int, int]]) -> None:
    """On equal GPUs, one of which a pin tells apart, the optimum is found and proven."""
    plan = held_against(*instance)
    if plan is not None and not instance[1].action_overhead_ns:
        assert plan.solver.status == "optimal"


@settings(max_examples=25, derandomize=True, deadline=None, suppress_health_check=CHECKS)
@given(pinned(equal=False))
def test_unequal_gpus(instance: tuple[Chain, Cluster, dict[int, int]]) -> None:
    """On GPUs of different speed and memory no claim about pinned layers is ever wrong."""
    held_against(*instance)


@settings(max_examples=25, derandomize=True, deadline=None, suppress_health_check=CHECKS)
@given(pinned(equal=True))
def test_contiguous(instance: tuple[Chain, Cluster, dict[int, int]]) -> None:
    """One stage per GPU under pins: the dynamic program is never wrong either."""
    held_against(*instance, contiguous=True)


@pytest.mark.parametrize("k", [2, "auto"])
def test_several_per_period(k: int | str) -> None:
    """With more micro-batches per period pins hold as well."""
    found = oracle_chain()
    plan = solved(*found, {0: 1, 3: 1}, k=k)
    assert plan is not None
    assert keeps(plan, {0: 1, 3: 1})


def oracle_chain() -> tuple[Chain, Cluster]:
    """Four layers that keep bytes, on two GPUs with little memory."""
    from pipeplan.cluster import uniform
    from tests import handmade

    fields = [{"saved_bytes": size} for size in (3, 2, 2, 1)]
    return handmade.chain([(2, 2)] * 4, fields), uniform(2, 14)
