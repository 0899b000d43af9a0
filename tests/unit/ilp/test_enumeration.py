"""Each allocation by itself: nothing is asked twice in a turn, whatever ticks hide."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from random import Random
from typing import Any

import pytest

from pipeplan.chain import Chain
from pipeplan.cluster import uniform
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.cpsat import period_search
from pipeplan.ilp.cpsat.solve import PeriodResult, Status, solve_each
from pipeplan.ilp.cpsat.variables import Instance
from pipeplan.ilp.exact import allocations, enumeration
from pipeplan.ilp.exact.branch_and_bound import decide
from pipeplan.ilp.incumbent import Incumbent, SearchOptions
from tests.property.test_planner_recompute_enumeration import machines, tiny
from tests.searches import limits


def slow(seed: int, layers: int = 3) -> Chain:
    """A tiny chain whose layers take tens of milliseconds and a few ns."""
    chain, draw = tiny(seed, layers), Random(seed)
    slower = [
        layer.model_copy(
            update={
                "forward_ns": layer.forward_ns * 10**7 + draw.randint(0, 99),
                "backward_ns": layer.backward_ns * 10**7 + draw.randint(0, 99),
            }
        )
        for layer in chain.layers
    ]
    return chain.model_copy(update={"layers": tuple(slower)})


@pytest.mark.parametrize(("seed", "best"), [(2, 80_000_178), (4, 60_000_216)])
def test_what_ticks_cannot_tell_apart_is_asked_once_a_turn(
    seed: int, best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In ticks a period one ns below the best seems possible: that is not asked for ever."""
    costs = CostModel(slow(seed), uniform(2, 13), "2bw", "exact")
    monkeypatch.setattr(period_search, "FINE_ITEMS", 0)
    whole = Instance(costs, ((0, 0), (1, 1), (2, 2)))
    assert period_search.exact_scaling(whole).tick > 1
    asked: set[object] = set()

    def watched(
        what: Sequence[tuple[Instance, int]],
        options: SearchOptions,
        seconds: float,
        lowest: int = 1,
        turn: int = 0,
    ) -> list[PeriodResult]:
        for instance, period in what:
            assert (turn, instance.places, period) not in asked
            asked.add((turn, instance.places, period))
        return solve_each(what, options, seconds, lowest, turn)

    monkeypatch.setattr(enumeration, "solve_each", watched)
    state = Incumbent(costs, limits(time_limit_s=60))
    state.raise_bound("any", Fraction(1))
    high = period_search.upper_bound(state, whole, tick=1)
    enumeration.BestFirstEnumeration(state, 1).run(
        enumeration.nodes(state, allocations.allocations(costs) or []), 10, high
    )
    assert state.best is not None
    assert state.bounds["k1"] <= state.best.period == best


@pytest.mark.parametrize("seed", [19, 23, 26])
def test_side_by_side_no_case_is_forgotten(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several found at once wait for their next turn by floor: as much is found as one by one."""
    monkeypatch.setattr(enumeration, "SHORTEN_S", 0.0)
    layers = Random(seed).choice([3, 4])
    chain = tiny(seed, layers)
    longer = [
        layer.model_copy(
            update={
                "forward_ns": layer.forward_ns * 7 + Random(seed + n).randint(0, 9),
                "backward_ns": layer.backward_ns * 7 + Random(seed - n).randint(0, 9),
            }
        )
        for n, layer in enumerate(chain.layers)
    ]
    chain = chain.model_copy(update={"layers": tuple(longer)})
    costs = CostModel(chain, machines(seed, layers, 2), "2bw", "exact")
    found = []
    for workers in (1, 4):
        state = Incumbent(costs, limits(time_limit_s=60, workers=workers))
        state.raise_bound("any", Fraction(1))
        high = period_search.upper_bound(state, Instance(costs, ()), tick=1)
        enumeration.BestFirstEnumeration(state, 1).run(
            enumeration.nodes(state, allocations.allocations(costs) or []), 30, high
        )
        assert state.best is not None
        found.append((state.best.period, state.bounds["k1"]))
    (alone, proven), (together, claimed) = found
    assert alone == proven
    assert (together, claimed) == (alone, proven)


def test_a_better_schedule_is_shortened_by_bisection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ns by ns it would take fifty million questions from the first plan to the shortest one."""
    costs = CostModel(slow(23, 4), uniform(3, 13), "2bw", "exact")
    state = Incumbent(costs, limits(time_limit_s=60))
    state.raise_bound("any", Fraction(1))
    asked: list[int] = []

    def watched(of: CostModel, home: allocations.Assignment, period: int, *rest: Any) -> Status:
        asked.append(period)
        assert len(asked) < 200
        return decide(of, home, period, *rest)

    monkeypatch.setattr(enumeration, "decide", watched)
    nodes = enumeration.nodes(state, allocations.allocations(costs) or [])
    assert enumeration.BestFirstEnumeration(state, 1).run(nodes, 60, 10**9)
    assert state.best is not None
    assert state.bounds["k1"] <= state.best.period == 60_000_216
