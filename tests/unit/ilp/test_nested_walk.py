"""Plans whose runs hold other runs are annealed, step by step."""

from __future__ import annotations

from fractions import Fraction
from random import Random

import numpy as np

from pipeplan.chain import Chain, Layer
from pipeplan.cluster import uniform
from pipeplan.ilp import Limits, Problem, solve
from pipeplan.ilp.local_search.allocation import Allocation
from pipeplan.ilp.recompute.nested_walk import NestedWalk
from pipeplan.ilp.recompute.options import list_options
from pipeplan.ilp.runs import Run
from tests.unit.ilp.test_recompute_search import random_costs


def test_plans_with_runs_in_runs_are_annealed() -> None:
    """In memory that one level of runs does not fit, a plan becomes a quarter shorter and more."""
    random = Random(0)
    layers = tuple(
        Layer(
            name=f"layer{number}",
            forward_ns=random.randint(80, 120),
            backward_ns=random.randint(160, 240),
            weight_bytes=1,
            output_bytes=random.randint(9, 11),
            saved_input_bytes=9 if number else 0,
            saved_bytes=random.randint(20, 40),
        )
        for number in range(12)
    )
    chain = Chain(name="scarce", input_bytes=10, layers=layers)
    cluster = uniform(3, 100, bandwidth_bytes_per_s=10**10)
    problem = Problem(chain=chain, cluster=cluster, recompute=True, ks=(1,))
    periods = []
    for without in ((), ("recompute annealing",)):
        asked = Limits(time_limit_s=2, deterministic=True, without=frozenset(without))
        found = solve(problem, asked)
        periods.append(found.per_microbatch)
        runs = [run for stage in found.stages if stage.remat for run in stage.remat.recompute]
        assert any(a != b and a[0] <= b[0] and b[1] <= a[1] for a in runs for b in runs)
    assert periods[0] < Fraction(3, 4) * periods[1]


def test_a_nested_walk_accepts_what_is_closer() -> None:
    """A cold walk stays at what lacks least; what it was told is closest is kept."""
    costs = random_costs(3, 9, memory=70)
    walk = NestedWalk(costs, list_options(costs.chain), Random(0), np.random.default_rng(0))
    layout = Allocation((0,) * 9, frozenset(), recompute=(Run(0, 5, inner=(Run(1, 2),)),))
    walk.begin(layout, 3.0, 100)
    assert walk.run(np.full(9, 1e-9)) == (0, 0)
    seen = []
    for excess in (4.0, 2.0, 2.5, 1.0, 5.0):
        seen.append(walk.new)
        walk.judged(excess)
        assert walk.run(np.full(9, 1e-9)) == (1, 0)
    assert walk.closest == (1.0, seen[3])
    assert len({(each.homes, each.splits, each.recompute) for each in seen}) > 2
