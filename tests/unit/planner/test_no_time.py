"""Layers that take no time: periods of 1 ns or less a micro-batch, forwards of no length."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from pipeplan.chain import Chain
from pipeplan.cluster import uniform
from pipeplan.ilp.bounds.load import closed_form_bound, contiguous_bound
from pipeplan.ilp.costs import CostModel
from pipeplan.plan import Plan
from pipeplan.planner import Config, solve
from tests import grids, handmade


def of(times: list[tuple[int, int]]) -> Chain:
    """Layers of these times that keep nothing."""
    return handmade.chain(times, [{} for _ in times])


def planned(times: list[tuple[int, int]], gpus: int, latency: int = 0, **asked: Any) -> Plan:
    """The plan that every voice agrees on, with memory to spare."""
    config = Config(**{"time_limit_s": 0.5, "workers": 1, "deterministic": True} | asked)
    return solve(of(times), uniform(gpus, 30, latency_ns=latency), config)


@pytest.mark.parametrize("recompute", ["off", "auto"])
@pytest.mark.parametrize("k", [2, "auto"])
def test_micro_batches_share_a_nanosecond(k: Any, recompute: str) -> None:
    """Nothing is claimed of contiguous plans but what holds for several copies."""
    plan = planned([(0, 0)], 1, k=k, recompute=recompute)
    bound = plan.solver.bounds.contiguous
    assert bound is not None
    assert Fraction(*bound) <= plan.period_per_microbatch == Fraction(1, plan.k)


def test_what_is_known_is_never_rounded_up() -> None:
    """A relaxation that has an answer at 1 ns proves no more than was known; of 2 ns it does."""
    free = CostModel(of([(0, 0)]), uniform(1, 30), "2bw", "exact")
    assert contiguous_bound(free, closed_form_bound(free)) == closed_form_bound(free) < 1
    work = CostModel(of([(0, 1), (1, 1)]), uniform(2, 30), "2bw", "exact")
    assert contiguous_bound(work, Fraction(1, 2)) == 2
    assert contiguous_bound(work, Fraction(9, 4)) == Fraction(9, 4)


@grids.each_pair(
    case={
        "three": ([(0, 0)] * 3, 2),
        "sixteen": ([(0, 0)] * 16, 3),
        "one that lasts": ([(1, 0), (0, 0)], 2),
    },
    semantics=["2bw", "flush"],
    recompute=["off", "auto"],
)
def test_no_period_is_shorter_than_a_nanosecond(
    case: tuple[list[tuple[int, int]], int], semantics: Any, recompute: str
) -> None:
    """However close to no time at all the search comes, periods are whole and positive."""
    times, gpus = case
    for k in (1, 2, "auto"):
        plan = planned(times, gpus, k=k, semantics=semantics, recompute=recompute)
        assert plan.period_ns >= 1


@pytest.mark.parametrize(("microbatches", "latency"), [(1, 0), (2, 1), (3, 1)])
@pytest.mark.parametrize("k", [1, 2, "auto"])
def test_forwards_of_no_length_wait_for_updates(microbatches: int, latency: int, k: Any) -> None:
    """A micro-batch counts until its update in (R6), which such a forward precedes."""
    plan = planned([(0, 1), (0, 1)], 2, latency, microbatches=microbatches, k=k)
    assert plan.microbatches == microbatches


def test_micro_batches_that_are_enough_for_updates() -> None:
    """Where none are asked for there are enough for two versions of the weights."""
    for latency in (0, 3, 9):
        assert planned([(0, 1), (0, 1)], 2, latency, k=1).microbatches >= 8
