"""Deciding each allocation by itself, held against brute force and against the joint model."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeplan.chain import Chain
from pipeplan.cluster import Cluster, uniform
from pipeplan.ilp import portfolio
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.exact import allocations
from pipeplan.plan import MemoryModel, Semantics
from tests import handmade, oracle
from tests.property.test_planner_oracle import chains, clusters, held_against, models, semantics

CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]


def test_equal_gpus_are_taken_in_order() -> None:
    """Five layers on three equal GPUs: as many allocations as ways to part a set; else none."""
    costs = CostModel(handmade.chain([(1, 1)] * 5), uniform(3, 10), "2bw", "exact")
    assert len(allocations.allocations(costs) or ()) == 1 + 15 + 25
    tied = handmade.chain(
        [(1, 1)] * 5, [{"parameters": ("w",)} if n in (0, 4) else {} for n in range(5)]
    )
    assert (
        len(allocations.allocations(CostModel(tied, uniform(3, 10), "2bw", "exact")) or ())
        == 1 + 7 + 6
    )
    pinned = CostModel(costs.chain, costs.cluster, "2bw", "exact", pins=((0, 2),))
    assert len(allocations.allocations(pinned) or ()) == 1 + 15 + 25
    assert (
        allocations.allocations(
            CostModel(handmade.chain([(1, 1)] * 12), uniform(3, 10), "2bw", "exact")
        )
        is None
    )


@settings(max_examples=40, derandomize=True, deadline=None, suppress_health_check=CHECKS)
@given(chains(5, st.integers(0, 2), messages=True), clusters(3, equal=True, messages=True), models)
def test_what_is_listed_fits(chain: Chain, cluster: Cluster, model: MemoryModel) -> None:
    """No allocation is left out that has a lower bound; in exact bytes each that is listed has."""
    costs = CostModel(chain, cluster, "2bw", model)
    listed = set(allocations.allocations(costs) or ())
    ample = replace(costs, cluster=uniform(len(cluster.gpus), 2**60))
    every = allocations.allocations(ample) or []
    fit = {home for home in every if allocations.lower_bound(costs, home, None) is not None}
    assert fit <= listed <= set(every)
    if model == "exact":
        assert fit == listed


@settings(max_examples=15, derandomize=True, deadline=None, suppress_health_check=CHECKS)
@given(
    chains(4, st.integers(1, 2), messages=False),
    clusters(3, equal=True, messages=False),
    semantics,
    models,
)
def test_without_the_joint_model(
    chain: Chain, cluster: Cluster, how: Semantics, model: MemoryModel
) -> None:
    """Alone it finds the optimum of k = 1 and proves it."""
    with mock.patch.object(portfolio, "FIRST_JOINT", 0.0):
        plan = held_against(chain, cluster, 1, how, model)
    if plan is not None and how == "2bw" and not cluster.action_overhead_ns:
        assert plan.solver.status == "optimal"


@settings(max_examples=8, derandomize=True, deadline=None, suppress_health_check=CHECKS)
@given(
    st.sampled_from([(3, 1), (3, 1), (2, 2)]).flatmap(
        lambda size: st.tuples(chains(size[0], st.integers(0, 2), messages=True), st.just(size[1]))
    ),
    clusters(2, equal=False, messages=True),
    semantics,
    models,
)
def test_unequal_and_messages(
    instance: tuple[Chain, int], cluster: Cluster, how: Semantics, model: MemoryModel
) -> None:
    """With transfers, unequal GPUs, several copies no claim is ever wrong."""
    chain, k = instance
    with mock.patch.object(portfolio, "FIRST_JOINT", 0.0):
        held_against(chain, cluster, k, how, model)


@pytest.mark.long
@settings(max_examples=12, derandomize=True, deadline=None, suppress_health_check=CHECKS)
@given(
    chains(3, st.integers(0, 2), messages=True),
    clusters(2, equal=False, messages=True),
    semantics,
    models,
)
def test_copies_of_three_layers(
    chain: Chain, cluster: Cluster, how: Semantics, model: MemoryModel
) -> None:
    """As above; brute force takes minutes for some of these."""
    with mock.patch.object(portfolio, "FIRST_JOINT", 0.0):
        held_against(chain, cluster, 2, how, model)


@settings(max_examples=25, derandomize=True, deadline=None, suppress_health_check=CHECKS)
@given(
    chains(3, st.integers(1, 2), messages=True),
    clusters(2, equal=True, messages=True),
    models,
    st.sampled_from([1, 1, 1, 2]),
)
def test_floors_hold(chain: Chain, cluster: Cluster, model: MemoryModel, k: int) -> None:
    """The smallest floor of all allocations is never above the optimum of any k."""
    costs = CostModel(chain, cluster, "2bw", model)
    limit = oracle.serial(chain, cluster) * k
    best = oracle.optimum(chain, cluster, k=k, limit=limit, memory_model=model)
    floors = [
        allocations.lower_bound(costs, home, None) for home in allocations.allocations(costs) or ()
    ]
    known = [floor for floor in floors if floor is not None]
    if best is not None:
        assert min(known) <= Fraction(best, k)
