"""What orders rule out has no schedule, what they find is one; they settle nearly everything."""

from __future__ import annotations

from collections import Counter

import pytest

from pipeplan.ilp.allocations.orders import Told, decided
from pipeplan.ilp.facts.costs import Costs
from pipeplan.ilp.state.clock import Clock
from pipeplan.ilp.state.incumbent import Incumbent
from tests import wheels
from tests.property.test_planner_every import machines, tiny
from tests.searches import limits


@pytest.mark.parametrize(
    ("layers", "gpus", "seeds"),
    [(3, 2, 10), (3, 3, 4), pytest.param(4, 2, 5, marks=pytest.mark.long)],
)
def test_orders_say_what_brute_force_does(layers: int, gpus: int, seeds: int) -> None:
    """Every set of runs, every allocation, the periods up to its shortest, by brute force."""
    told: Counter[Told] = Counter()
    for seed in range(seeds):
        chain, cluster = tiny(seed, layers), machines(seed, layers, gpus)
        for case in wheels.every_case(chain, cluster):
            costs = Costs(case.machine.chain, cluster, "2bw", "exact")
            for period in range(case.load, case.load + 3):
                state = Incumbent(costs, limits())
                answer = decided(costs, case.homes, period, state.offer, Clock())
                possible = case.possible(period)
                assert answer is not (Told.RULED_OUT if possible else Told.TAKEN)
                told[answer] += 1
                if possible:
                    break
    assert 50 * told[Told.OPEN] < told[Told.TAKEN] + told[Told.RULED_OUT]


def test_it_gives_up_where_there_is_too_much_to_try() -> None:
    """Beyond the places allowed nothing is claimed."""
    costs = Costs(tiny(0, 4), machines(0, 4, 3), "2bw", "exact")
    state = Incumbent(costs, limits())
    full = decided(costs, (0, 1, 0, 2), 6, state.offer, Clock())
    short = decided(costs, (0, 1, 0, 2), 6, state.offer, Clock(), nodes=0)
    assert (full, short) == (Told.RULED_OUT, Told.OPEN)
