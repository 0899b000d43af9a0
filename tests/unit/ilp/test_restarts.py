"""Loads evened out from equal shares: near the bound where memory is ample, and only there."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

import pytest

from pipeplan.cluster import uniform
from pipeplan.ilp.bounds.load import closed_form_bound, load_bound
from pipeplan.ilp.clock import DeterministicClock
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.local_search.allocation import Allocation
from pipeplan.ilp.local_search.restarts import WITHIN, EqualSplitRestarts
from pipeplan.ilp.search import contiguous
from pipeplan.testing.instances import Case, chain_of
from tests import handmade
from tests.searches import limits


def started(costs: CostModel, seed: int = 0, gap: float = 0) -> Incumbent:
    """The contiguous optimum, with bounds, on a clock that counts work."""
    asked = limits(time_limit_s=60, clock=DeterministicClock(), seed=seed, gap=gap)
    state = Incumbent(costs, asked)
    state.raise_bound("any", closed_form_bound(costs))
    contiguous(state)
    return state


def test_loads_come_out_even_where_steps_from_the_best_plan_do_not_lead() -> None:
    """ResNet-34 on 4 GPUs, ample memory: 7.5 % above the bound at first, then within 2 %.

    Five of six seeds get there.
    """
    case = Case("resnet34", 4, 1.2, "exact")
    costs = CostModel(chain_of("resnet34"), case.cluster, "2bw", "exact")
    state = started(costs, seed=2, gap=0.0199)
    assert state.gap is not None
    assert state.gap > 0.07
    EqualSplitRestarts(state).run(20)
    assert state.gap < 0.02
    assert state.best is not None
    assert state.is_feasible(state.best)
    assert load_bound(costs) <= state.best.per_microbatch


def test_pinned_layers_stay() -> None:
    """Evened out with the heaviest layers pinned apart: they are where they were asked to be."""
    times = [(20, 50), (10, 30)] * 8
    pins = ((0, 2), (7, 1), (15, 0))
    costs = CostModel(handmade.chain(times), uniform(3, 2**40), "2bw", "exact", pins=pins)
    state = started(costs)
    assert state.best is not None
    before = state.best.per_microbatch
    state.raise_bound("any", before * Fraction(99, 100))
    EqualSplitRestarts(state).run(4)
    homes = Allocation.of(state.best, 1).homes
    assert [homes[layer] for layer, _ in pins] == [gpu for _, gpu in pins]
    assert state.best.per_microbatch <= before


def test_torn_units_end_it_with_a_bound() -> None:
    """Where pins tear layers that no cut may part, periods are ruled out instead of tried."""
    cluster = uniform(2, 100, bandwidth_bytes_per_s=10**9, duplex="half")
    of = handmade.chain([(1, 1)] * 4, [{"output_bytes": 25}] * 4)
    state = started(CostModel(of, cluster, "2bw", "exact", pins=((0, 0), (2, 1))))
    assert state.best is not None
    best = state.best.per_microbatch
    state.bounds["any"] = best * Fraction(9, 10)  # between a cut's 50 ns and this nothing fits
    EqualSplitRestarts(state).run(30)
    assert best * Fraction(9, 10) <= state.bounds["any"] <= best
    assert state.elapsed < 30


@pytest.mark.parametrize("gpus", [1, 3])
def test_far_plans_and_single_gpus_are_left_alone(gpus: int) -> None:
    """More than a seventh above the bound memory rules, and one GPU has no loads to even out."""
    costs = CostModel(handmade.chain([(10, 20)] * 16), uniform(gpus, 2**40), "2bw", "exact")
    state = started(costs)
    assert state.best is not None
    state.bounds["any"] = state.best.per_microbatch / (1 + WITHIN) - 1
    before, spent = state.best, state.elapsed
    EqualSplitRestarts(state).run(30)
    assert state.best is before
    assert state.elapsed < spent + 0.1


def test_a_round_is_as_short_as_the_time_left() -> None:
    """A tenth of a second is not overrun by the seconds that a full round would take."""
    case = Case("densenet121", 8, 1.2, "exact")
    costs = CostModel(chain_of("densenet121"), case.cluster, "2bw", "exact")
    state = started(costs)
    spent = state.elapsed
    EqualSplitRestarts(state).run(0.1)
    assert ceil(state.elapsed - spent) <= 1
