"""All layers in one model as a finder: shorter plans, true refutations, none where it is idle."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise
from unittest import mock

from pipeplan.cluster import uniform
from pipeplan.ilp.bounds.load import closed_form_bound
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.cpsat.period_search import solve_and_repair
from pipeplan.ilp.incumbent import MODEL_K, Incumbent
from pipeplan.ilp.local_search import unrestricted
from pipeplan.ilp.local_search.lns import MAX_TASKS
from pipeplan.ilp.local_search.unrestricted import MOST_LAYERS, UnrestrictedModel
from pipeplan.ilp.noncontiguous import joint
from pipeplan.ilp.search import contiguous
from pipeplan.plan import Semantics
from tests import handmade
from tests.searches import limits

CASES: tuple[tuple[Semantics, int, int, tuple[int, ...]], ...] = (
    ("flush", 5, 1, (1,)),
    ("2bw", 5, 1, (1, 2, 9)),
    ("2bw", 5, 1_000_003, (1,)),
)
"""(semantics, layers, ns of a unit of time, ks)."""


def started(layers: int, memory: int) -> Incumbent:
    """A chain of `layers` uneven layers on two GPUs with the best contiguous plan."""
    times = [(1 + layer % 3, 2 + layer % 2) for layer in range(layers)]
    fields = [{"saved_bytes": max(0, 9 - layer), "output_bytes": 1} for layer in range(layers)]
    cluster = uniform(2, memory, bandwidth_bytes_per_s=10**9, duplex="half")
    state = Incumbent(
        CostModel(handmade.chain(times, fields), cluster, "2bw", "exact"), limits(time_limit_s=200)
    )
    state.raise_bound("any", closed_form_bound(state.costs))
    contiguous(state)
    return state


def test_finds_and_refutes_as_the_exact_search_does() -> None:
    """At several memories its plans are no shorter, its bound no longer than the optimum."""
    shorter = raised = 0
    bests = []
    for memory in (30, 34, 38, 46):
        exact, whole = started(5, memory), started(5, memory)
        assert exact.best is not None
        first = exact.best.per_microbatch
        assert joint(exact, 1, 60)
        UnrestrictedModel(whole).run(60)
        assert whole.best is not None
        optimum, found = exact.best.per_microbatch, whole.best.per_microbatch
        assert whole.bounds["k1"] <= optimum <= found <= first
        shorter += found < first
        raised += whole.bounds["k1"] > started(5, memory).bounds["k1"]
        bests.append(found)
    assert shorter
    assert raised
    assert all(one >= other for one, other in pairwise(bests))


def test_idle_where_the_gap_is_small_or_layers_are_many() -> None:
    """Within 3 % of the bound, or beyond the largest model, nothing is asked."""
    for state in (started(5, 38), started(MOST_LAYERS + 1, 10**6)):
        assert state.best is not None
        if state.costs.layers == 5:
            state.raise_bound("any", state.best.per_microbatch * Fraction(99, 100))
        phases: list[str] = []
        state.report = lambda *args, heard=phases: heard.append(str(args[-1]))
        UnrestrictedModel(state).run(5)
        assert not phases


def test_nothing_is_asked_twice() -> None:
    """Not where shorter periods are no shorter steps, or ends lie within a tick; few ks."""
    asked_ks = set()
    for semantics, layers, scale, ks in CASES:
        times = [(scale * (1 + n % 3), scale * (2 + n % 2)) for n in range(layers)]
        fields = [{"saved_bytes": max(0, 9 - n), "output_bytes": 1} for n in range(layers)]
        cluster = uniform(2, 34, bandwidth_bytes_per_s=10**9, duplex="half")
        costs = CostModel(handmade.chain(times, fields), cluster, semantics, "exact")
        state = Incumbent(costs, limits(microbatches=4, ks=ks, time_limit_s=200))
        state.raise_bound("any", closed_form_bound(costs) / 2)
        contiguous(state)
        with mock.patch.object(unrestricted, "solve_and_repair", wraps=solve_and_repair) as calls:
            UnrestrictedModel(state).run(30)
        asked = [(call.args[1].k, call.args[2]) for call in calls.call_args_list]
        assert len(asked) == len(set(asked)) > 0
        assert all(layers * k <= MAX_TASKS and k <= MODEL_K for k, _ in asked)
        asked_ks |= {k for k, _ in asked}
    assert asked_ks == {1, 2}
