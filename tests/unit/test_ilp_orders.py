"""What orders rule out has no schedule, what they find is one; they settle nearly everything."""

from __future__ import annotations

from collections import Counter

import pytest

from pipeplan.ilp.clock import Clock
from pipeplan.ilp.costs import Costs
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.orders import decided
from tests import wheels
from tests.property.test_planner_every import machines, tiny
from tests.searches import limits


@pytest.mark.parametrize(
    ("layers", "gpus", "seeds"),
    [(3, 2, 10), (3, 3, 4), pytest.param(4, 2, 5, marks=pytest.mark.long)],
)
def test_orders_say_what_brute_force_does(layers: int, gpus: int, seeds: int) -> None:
    """Every set of runs, every allocation, the periods up to its shortest, by brute force."""
    told: Counter[tuple[bool, bool]] = Counter()
    for seed in range(seeds):
        chain, cluster = tiny(seed, layers), machines(seed, layers, gpus)
        for case in wheels.every_case(chain, cluster):
            costs = Costs(case.machine.chain, cluster, "2bw", "exact")
            for period in range(case.load, case.load + 3):
                answer = decided(costs, case.homes, period, Clock())
                possible = case.possible(period)
                assert not (answer.ruled_out and possible)
                if answer.schedule is not None and possible:
                    state = Incumbent(costs, limits())
                    told[possible, state.offer(answer.schedule)] += 1
                else:
                    told[possible, answer.ruled_out] += 1
                if possible:
                    break
    wrong = told[True, False] + told[False, False]
    assert 50 * wrong < told[True, True] + told[False, True]


def test_it_gives_up_where_there_is_too_much_to_try() -> None:
    """Beyond the places allowed nothing is claimed."""
    costs = Costs(tiny(0, 4), machines(0, 4, 3), "2bw", "exact")
    assert decided(costs, (0, 1, 0, 2), 6, Clock()).ruled_out
    short = decided(costs, (0, 1, 0, 2), 6, Clock(), nodes=0)
    assert not short.ruled_out
    assert short.schedule is None
