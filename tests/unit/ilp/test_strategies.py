"""What every strategy of the portfolio promises, whatever it does inside.

What it offers is right by every voice; the best plan never gets worse; pins, ties and limits on
copies are kept; it ends soon after its slice; a seed gives one result; a second slice goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest

from pipeplan.chain import Chain
from pipeplan.cluster import Cluster, Gpu, Links, uniform
from pipeplan.ilp.bounds.load import closed_form_bound
from pipeplan.ilp.clock import DeterministicClock
from pipeplan.ilp.contiguous.kfkb_search import KFkBSearch
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.local_search.annealing import SimulatedAnnealing
from pipeplan.ilp.noncontiguous import STRATEGIES, find_any_plan
from pipeplan.ilp.portfolio import Strategy
from pipeplan.ilp.problem import Problem
from pipeplan.ilp.recompute.annealing import RecomputeAnnealing
from pipeplan.ilp.recompute.balancing import RecomputeBalancing
from pipeplan.ilp.recompute.joint_incumbent import JointIncumbent
from pipeplan.ilp.recompute.search_result import SearchResult
from pipeplan.ilp.search import contiguous
from pipeplan.ilp.solution import solution
from pipeplan.planner import Config
from pipeplan.planner.assemble import assemble, cross_check
from tests import grids, handmade
from tests.searches import limits

SLICE_S = 0.1
OVER_S = 0.5
"""Work after the end of a slice: one step of any strategy."""

Make = Callable[[Incumbent], tuple[Strategy, Callable[[], SearchResult]]]


def _on_a_chain(make: Callable[[Incumbent, SimulatedAnnealing], Strategy]) -> Make:
    def begun(state: Incumbent) -> tuple[Strategy, Callable[[], SearchResult]]:
        return make(state, SimulatedAnnealing(state)), lambda: SearchResult(state)

    return begun


def _recomputing(balancing: bool) -> Make:
    def begun(state: Incumbent) -> tuple[Strategy, Callable[[], SearchResult]]:
        whole = Incumbent(state.costs, state.options)
        whole.raise_bound("any", state.bounds["any"], from_bytes=False)
        joint = JointIncumbent(whole, SearchResult(state))
        annealing = RecomputeAnnealing(joint, None)
        strategy = RecomputeBalancing(joint, annealing) if balancing else annealing
        return strategy, lambda: joint.best

    return begun


ALL: dict[str, Make] = {
    "kfkb": lambda state: (KFkBSearch(state), lambda: SearchResult(state)),
    **{f"strategy {number}": _on_a_chain(make) for number, make in enumerate(STRATEGIES)},
    "recompute balancing": _recomputing(True),
    "recompute annealing": _recomputing(False),
}


@dataclass(frozen=True)
class Case:
    """A chain of 16 layers with room above the bound; the joint model would be too large."""

    chain: Chain
    cluster: Cluster
    pins: tuple[tuple[int, int], ...] = ()
    ks: tuple[int, ...] = (1, 2, 3)

    def begun(self, seed: int = 0) -> Incumbent:
        """With the best contiguous plan, or any plan."""
        costs = CostModel(self.chain, self.cluster, "2bw", "exact", pins=self.pins)
        clock = DeterministicClock()
        state = Incumbent(costs, limits(time_limit_s=60, ks=self.ks, seed=seed, clock=clock))
        state.raise_bound("any", closed_form_bound(costs))
        contiguous(state)
        if state.best is None:
            find_any_plan(state)
        assert state.best is not None
        assert not state.done
        return state


def _layers(**fields: object) -> Chain:
    times = [(3 + layer % 3, 5 + layer % 4) for layer in range(16)]
    shapes = [{"saved_bytes": 12 - layer // 2, "output_bytes": 2} for layer in range(16)]
    ties = [{"parameters": ("w",)} if layer in (2, 9) else {} for layer in range(16)]
    rows = [
        shape | (tie if fields.get("tied") else {})
        for shape, tie in zip(shapes, ties, strict=True)
    ]
    return handmade.chain(times, rows)


CASES = {
    "scarce": Case(_layers(), uniform(4, 95, bandwidth_bytes_per_s=10**9)),
    "ample": Case(_layers(), uniform(3, 10**4, bandwidth_bytes_per_s=10**9, duplex="half")),
    "pinned and tied": Case(_layers(tied=True), uniform(3, 250), pins=((0, 1), (15, 1)), ks=(1,)),
    "unequal": Case(
        _layers(),
        Cluster(
            gpus=tuple(
                Gpu(name=f"gpu{number}", memory_bytes=size, speed=speed)
                for number, (size, speed) in enumerate(((150, 1.0), (120, 0.5), (200, 2.0)))
            ),
            links=Links(latency_ns=1, bandwidth_bytes_per_s=10**9),
        ),
        ks=(2,),
    ),
}

each_strategy = pytest.mark.parametrize("make", ALL.values(), ids=ALL)


def asked(kind: str, name: str) -> tuple[Case, Make]:
    """Pins do not go with recomputation: the planner refuses them."""
    case = CASES[kind]
    return replace(case, pins=()) if name.startswith("recompute") else case, ALL[name]


def judged(case: Case, found: SearchResult) -> None:
    """Verifier, lowering and both replays agree with what the solver claims of its best plan."""
    asked = Problem(
        chain=case.chain,
        cluster=case.cluster,
        ks=case.ks,
        recompute=found.contracted is not None,
        pins=case.pins,
    )
    claimed = solution(found, ())
    plan = assemble(asked, claimed, Config(workers=1))
    cross_check(plan, claimed)
    homes = {
        layer: stage.gpu for stage in plan.stages for layer in range(stage.first, stage.last + 1)
    }
    assert all(homes[layer] == gpu for layer, gpu in case.pins)
    tied = [homes[n] for n, layer in enumerate(case.chain.layers) if layer.parameters]
    assert len(set(tied)) <= 1
    assert len(case.ks) > 1 or plan.k == case.ks[0]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", CASES)
def test_what_is_kept_is_right_and_never_worse(kind: str, name: str) -> None:
    """By all voices, after each of two slices; and no bound is above a plan."""
    case, make = asked(kind, name)
    state = case.begun()
    strategy, best = make(state)
    known = best().cost
    for _ in range(2):
        strategy.run(SLICE_S)
        assert best().cost <= known
        known = best().cost
        judged(case, best())
    schedule = best().state.best
    assert schedule is not None
    assert state.bounds["any"] <= schedule.per_microbatch


@grids.each_value(kind=list(CASES), name=list(ALL))
def test_a_slice_ends_and_a_seed_gives_one_result(kind: str, name: str) -> None:
    """Work after its end is that of one step; the same twice, with the same work."""
    case, make = asked(kind, name)
    ended = []
    for _ in range(2):
        state = case.begun(seed=3)
        strategy, best = make(state)
        before = state.options.clock.spent
        strategy.run(SLICE_S)
        used = state.options.clock.spent - before
        assert used <= SLICE_S + OVER_S
        ended.append((best().cost, best().stages, used))
    assert ended[0] == ended[1]


@each_strategy
def test_a_second_slice_goes_on(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not try what the first one tried, in the same order, again."""
    state = CASES["scarce"].begun()
    # Nothing is ever better, so that both slices begin from the same plan.
    offered: list[object] = []
    monkeypatch.setattr(
        Incumbent, "offer", lambda self, schedule: bool(offered.append(schedule.stages))
    )
    strategy, _ = make(state)
    tried = []
    for _ in range(2):
        offered.clear()
        strategy.run(SLICE_S)
        tried.append(list(offered))
    assert not tried[0] or tried[0] != tried[1]


@each_strategy
def test_nothing_is_done_where_nothing_can_be_gained(make: Make) -> None:
    """The best plan is at the bound: the search is over."""
    state = CASES["ample"].begun()
    assert state.best is not None
    state.raise_bound("any", state.best.per_microbatch)
    strategy, best = make(state)
    whole = best().cost
    before = state.options.clock.spent
    strategy.run(SLICE_S)
    assert best().cost == whole
    assert state.options.clock.spent - before <= OVER_S
