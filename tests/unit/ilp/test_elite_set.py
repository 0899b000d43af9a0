"""Allocations from which annealing goes on: which are kept, and for how long."""

from __future__ import annotations

from fractions import Fraction
from random import Random
from unittest import mock

from pipeplan.cluster import uniform
from pipeplan.ilp.bounds.load import closed_form_bound
from pipeplan.ilp.clock import DeterministicClock
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.local_search.allocation import Allocation
from pipeplan.ilp.local_search.annealing import SimulatedAnnealing
from pipeplan.ilp.local_search.elite_set import PATIENCE, SIZE, EliteSet, Start
from pipeplan.ilp.local_search.interleaved_starts import GOING_ON, SETTLING, InterleavedStarts
from pipeplan.ilp.search import contiguous
from tests import handmade
from tests.searches import limits

LAYOUT = Allocation((0, 1), frozenset())


def near(excess: float, target: int = 5, failures: int = 0) -> Start:
    """An allocation so far from a plan of period `target`."""
    return Start(excess, Fraction(target), LAYOUT, failures)


def taken(kept: EliteSet, least: int = 1, best: int = 10) -> list[float]:
    """The excesses of all that may shorten a plan of period `best`."""
    found: list[float] = []
    while (one := kept.take(Random(0), Fraction(least), Fraction(best))) is not None:
        found.append(one.excess)
    return sorted(found)


def test_the_closest_are_kept() -> None:
    """No more of them than the set holds; what is a plan is none of them."""
    kept = EliteSet()
    for tenths in (*range(2 * SIZE, 0, -1), 0):
        kept.add(near(tenths / 10))
    assert taken(kept) == [tenths / 10 for tenths in range(1, SIZE + 1)]


def test_what_was_tried_in_vain_goes() -> None:
    """One that annealing came no closer from, so many times."""
    kept = EliteSet()
    kept.add(near(0.1, failures=PATIENCE))
    kept.add(near(0.2, failures=PATIENCE - 1))
    assert taken(kept) == [0.2]


def test_only_shorter_periods_than_the_best_plans_and_not_below_the_bound() -> None:
    """The others cannot shorten it any more."""
    kept = EliteSet()
    for target in (3, 4, 9, 10):
        kept.add(near(target / 10, target))
    assert taken(kept, least=4, best=10) == [0.4, 0.9]
    assert taken(kept, least=1, best=99) == []


def test_interleaved_starts_go_on_from_what_ended_close() -> None:
    """After each start, from one of those before, at the period that it was judged at."""
    times, sizes = [(10, 20)] * 12, [{"saved_bytes": 10}] * 12
    costs = CostModel(handmade.chain(times, sizes), uniform(4, 70), "2bw", "exact")
    state = Incumbent(costs, limits(clock=DeterministicClock()))
    state.raise_bound("any", closed_form_bound(costs))
    contiguous(state)
    annealing = SimulatedAnnealing(state)
    began: list[tuple[Allocation, Fraction, int]] = []
    ended: list[tuple[Allocation, Fraction]] = []
    anneal = annealing.anneal_from

    def heard(
        layout: Allocation, target: Fraction, steps: int, *rest: float
    ) -> tuple[float, Allocation]:
        excess, closest = anneal(layout, target, steps, *rest)
        began.append((layout, target, steps))
        ended.append((closest, target))
        return excess, closest

    with mock.patch.object(annealing, "anneal_from", heard):
        InterleavedStarts(state, annealing).run(1)
    again = [place for place, (_, _, steps) in enumerate(began) if steps == GOING_ON]
    assert len(again) > 5
    assert all(began[place - 1][2] == SETTLING for place in again)
    assert all(began[place][:2] in ended[:place] for place in again)
