"""Allocations of few runs: exactly those that a period allows, and plans that they give."""

from __future__ import annotations

from heapq import nlargest
from itertools import islice, pairwise, product
from unittest import mock

from pipeplan.cluster import uniform
from pipeplan.ilp.bounds.load import closed_form_bound
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.exact import stage_counts
from pipeplan.ilp.exact.stage_counts import StageCountEnumeration, balanced_allocations
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.noncontiguous import joint
from pipeplan.ilp.search import contiguous
from tests import handmade
from tests.searches import limits

FORWARD = (4, 4, 1, 3)
UNEVEN = [(each, each) for each in FORWARD]
"""One stage per GPU: 16 on the slower of two; layers 0 and 3 against 1 and 2: 14."""
PERIODS = (13, 14, 16, 24)


def costs_of(memory: int = 10**6, pins: tuple[tuple[int, int], ...] = ()) -> CostModel:
    """The uneven chain on two GPUs; moving a tensor takes no time to speak of."""
    fields = [{"saved_bytes": 1, "output_bytes": 1} for _ in UNEVEN]
    cluster = uniform(2, memory, bandwidth_bytes_per_s=10**12)
    return CostModel(handmade.chain(UNEVEN, fields), cluster, "2bw", "exact", pins=pins)


def test_even_has_each_allocation_once() -> None:
    """All allocations of so many runs and such loads, of equal GPUs the first one first."""
    costs = costs_of()
    some = 0
    for period, runs in product(PERIODS, range(1, 5)):
        listed = [home for home in balanced_allocations(costs, period, runs) if home is not None]
        loads = {
            home: [sum(2 * FORWARD[n] for n in range(4) if home[n] == gpu) for gpu in (0, 1)]
            for home in product((0, 1), repeat=4)
            if home[0] == 0 and 1 + sum(one != other for one, other in pairwise(home)) == runs
        }
        assert sorted(listed) == sorted(home for home in loads if max(loads[home]) <= period)
        some += len(listed)
    assert some


def test_even_keeps_pins() -> None:
    """A pinned layer sits on its GPU; a GPU that a pin names is not exchanged for an equal one."""
    homes = [
        home for home in balanced_allocations(costs_of(pins=((3, 1),)), 24, 2) if home is not None
    ]
    assert homes
    assert all(home[3] == 1 for home in homes)


def test_cuts_longer_than_the_period_are_left_out() -> None:
    """A tensor that takes longer than the period crosses no cut."""
    fields = [{"output_bytes": 15}, {"output_bytes": 1}, {"output_bytes": 1}, {}]
    cluster = uniform(2, 10**6, bandwidth_bytes_per_s=10**9)
    costs = CostModel(handmade.chain(UNEVEN, fields), cluster, "2bw", "exact")
    homes = [home for home in balanced_allocations(costs, 14, 4) if home is not None]
    homes += [home for home in balanced_allocations(costs, 14, 3) if home is not None]
    assert homes == []
    assert any(home for home in balanced_allocations(costs, 16, 3))


def started(memory: int) -> Incumbent:
    """The best contiguous plan."""
    state = Incumbent(costs_of(memory), limits(time_limit_s=200))
    state.raise_bound("any", closed_form_bound(state.costs))
    contiguous(state)
    return state


def test_between_the_contiguous_plan_and_the_optimum() -> None:
    """Where memory allows the even allocation it is found; where it does not, nothing false is."""
    found = []
    for memory in range(4, 9):
        by_counts, exact = started(memory), started(memory)
        assert by_counts.best is not None
        before = by_counts.best.per_microbatch
        StageCountEnumeration(by_counts).run(100)
        assert joint(exact, 1, 60)
        assert exact.best is not None
        assert by_counts.is_feasible(by_counts.best)
        assert exact.best.per_microbatch <= by_counts.best.per_microbatch <= before
        found.append((before, by_counts.best.per_microbatch))
    assert (16, 14) in found
    assert any(after == before for before, after in found)


def test_every_beginning_that_ends_is_told() -> None:
    """Who asks can look at the clock again and again, also where no allocation is left."""
    fields = [{"output_bytes": 1}] * 17  # four on each of four GPUs are 16
    cluster = uniform(4, 10**6, bandwidth_bytes_per_s=10**12)
    costs = CostModel(handmade.chain([(7, 7)] * 17, fields), cluster, "2bw", "exact")
    with mock.patch.object(stage_counts, "nlargest", side_effect=nlargest) as asked:
        told = list(islice(balanced_allocations(costs, 69, 8), 2000))
    assert told == [None] * 2000
    assert asked.call_count <= 18 * len(told)
