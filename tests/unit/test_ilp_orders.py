"""What orders of forwards and backwards rule out has no schedule; they rule out most of it."""

from __future__ import annotations

import pytest

from pipeplan.ilp.clock import Clock
from pipeplan.ilp.costs import Costs
from pipeplan.ilp.orders import ruled_out
from tests import wheels
from tests.property.test_planner_every import machines, tiny


@pytest.mark.parametrize(
    ("layers", "gpus", "seeds"),
    [(3, 2, 10), (3, 3, 4), pytest.param(4, 2, 5, marks=pytest.mark.long)],
)
def test_nothing_that_is_possible_is_ruled_out(layers: int, gpus: int, seeds: int) -> None:
    """Every set of runs, every allocation, the periods up to its shortest, by brute force."""
    told = {True: 0, False: 0}
    for seed in range(seeds):
        chain, cluster = tiny(seed, layers), machines(seed, layers, gpus)
        for case in wheels.every_case(chain, cluster):
            costs = Costs(case.machine.chain, cluster, "2bw", "exact")
            for period in range(case.load, case.load + 4):
                out = ruled_out(costs, case.homes, period, Clock())
                possible = case.possible(period)
                assert not (out and possible)
                if possible:
                    break
                told[bool(out)] += 1
    assert told[True] > 10 * told[False]


def test_it_gives_up_where_there_is_too_much_to_try() -> None:
    """Beyond the places allowed nothing is claimed."""
    costs = Costs(tiny(0, 4), machines(0, 4, 3), "2bw", "exact")
    assert ruled_out(costs, (0, 1, 0, 2), 6, Clock()) is True
    assert ruled_out(costs, (0, 1, 0, 2), 6, Clock(), nodes=1) is None
