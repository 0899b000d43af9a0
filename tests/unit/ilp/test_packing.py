"""The packing bound: what it sees that sums do not, and that it never exceeds what is possible."""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from random import Random

import pytest

from pipeplan.cluster import uniform
from pipeplan.ilp.bounds import packing
from pipeplan.ilp.bounds.load import closed_form_bound
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.schedule import Schedule
from tests import handmade
from tests.searches import limits


def searched(loads: list[int], gpus: int, high: int) -> Fraction:
    """The bound for layers of these loads on equal GPUs without links' cost or memory limits."""
    chain = handmade.chain([(load // 3, load - load // 3) for load in loads])
    state = Incumbent(CostModel(chain, uniform(gpus, 2**40), "2bw", "exact"), limits())
    state.raise_bound("any", closed_form_bound(state.costs))
    state.best = Schedule((), high, 1, {})
    packing.raise_bound(state, 10)
    return state.bounds["any"]


def least(loads: list[int], gpus: int) -> int:
    """The smallest largest load over every assignment."""
    best = sum(loads)
    for homes in product(range(gpus), repeat=len(loads)):
        totals = [0] * gpus
        for load, home in zip(loads, homes, strict=True):
            totals[home] += load
        best = min(best, max(totals))
    return best


def test_a_heavy_head_leaves_fewer_gpus_for_the_blocks() -> None:
    """96 blocks of 100 and a head of 290 on 33 GPUs: one GPU for the head, 3 blocks each: 300."""
    assert searched([100] * 96 + [290], 33, 400) == 300
    assert searched([100] * 97 + [290], 33, 500) == 390


def test_two_alternating_sizes() -> None:
    """Blocks in two parts: 10 parts of 70 and 10 of 40 on 3 GPUs need 370, not 1100 / 3."""
    assert searched([70, 40] * 10, 3, 500) == 370


@pytest.mark.parametrize("seed", range(12))
def test_the_bound_is_the_best_packing(seed: int) -> None:
    """On small cases bisection ends at the optimum over all assignments, never above it."""
    rng = Random(seed)
    sizes = [rng.randint(3, 40) for _ in range(3)]
    loads = [rng.choice(sizes) for _ in range(rng.randint(4, 8))]
    gpus = rng.randint(2, 3)
    assert searched(loads, gpus, sum(loads)) == least(loads, gpus)


def test_many_sizes_are_left_alone() -> None:
    """Fifty different layers are more patterns than can be listed: the bound stays, at once."""
    loads = [100 + n for n in range(50)]
    assert searched(loads, 4, 4 * sum(loads)) >= Fraction(sum(loads), 4)
