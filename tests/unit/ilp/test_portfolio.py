"""Slices: they grow, follow who finds something, and end when nothing is left to try."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest

from pipeplan.cluster import uniform
from pipeplan.ilp.clock import DeterministicClock
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.local_search.list_scheduler import ModuloListScheduler
from pipeplan.ilp.portfolio import FIRST_SLICE_S, LEAST, LONGER, Arm, Portfolio
from tests import handmade
from tests.searches import limits


def begun() -> Incumbent:
    """A search of 100 s that counts work."""
    costs = CostModel(handmade.chain([(2, 3)] * 5), uniform(3, 10**6), "2bw", "exact")
    options = replace(limits(), clock=DeterministicClock(), time_limit_s=100)
    state = Incumbent(costs, options)
    state.raise_bound("any", Fraction(1))
    return state


def test_what_finds_nothing_has_less_time() -> None:
    """A strategy's slice is halved down to a quarter; who finds something has all of it."""
    state = begun()
    given: list[tuple[str, float]] = []

    def idle(seconds: float) -> None:
        given.append(("idle", seconds))
        state.options.clock.charge(seconds)

    def lucky(seconds: float) -> None:
        given.append(("lucky", seconds))
        placing = ModuloListScheduler(state.costs, [(0, 4, 0)], 25 + 99 - len(given))
        assert placing.place()
        assert state.offer(placing.schedule())
        state.options.clock.charge(seconds)

    arms = [Arm("idle", idle), Arm("lucky", lucky)]
    Portfolio(state, arms, lambda: state.done, lambda: state.cost).run()
    ratios = [one[1] / other[1] for one, other in zip(given[::2], given[1::2], strict=False)]
    assert ratios[:4] == pytest.approx([1, 0.5, LEAST, LEAST])
    slices = [seconds for name, seconds in given if name == "lucky"]
    assert slices[:3] == pytest.approx([FIRST_SLICE_S * LONGER**n for n in range(3)])
    assert state.remaining <= 0


def test_rounds_end_when_nothing_is_left() -> None:
    """Strategies that have nothing to do do not use up the time."""
    state = begun()
    Portfolio(
        state, [Arm("idle", lambda seconds: None)], lambda: state.done, lambda: state.cost
    ).run()
    assert state.remaining > 90


def test_what_is_left_out_has_no_slice() -> None:
    """As ablations ask."""
    state = begun()
    state.options = replace(state.options, without=frozenset({"idle"}))
    given: list[float] = []
    Portfolio(state, [Arm("idle", given.append)], lambda: state.done, lambda: state.cost).run()
    assert not given


def test_each_strategy_has_random_numbers_of_its_own() -> None:
    """Of a seed the same ones, of another name or seed others."""
    state = begun()
    draws = [state.random(name).random() for name in ("annealing", "annealing", "balancing")]
    state.options = replace(state.options, seed=1)
    draws.append(state.random("annealing").random())
    assert draws[0] == draws[1]
    assert len(set(draws)) == 3
