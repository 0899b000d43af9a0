"""The interval formulation: equal to brute force, within its budgets by the judge."""

from __future__ import annotations

import pytest

from pipeplan.operator_graph import StorageKind
from pipeplan.remat.graph.brute_force import best_order
from pipeplan.remat.graph.intervals.search import SearchLimits, search
from pipeplan.remat.graph.intervals.slots import Slots, runs_of
from pipeplan.remat.graph.ledger import Ledger
from pipeplan.remat.graph.order_program import program
from pipeplan.remat.graph.orders import (
    bytes_during,
    further,
    peak_bytes,
    saved_bytes,
    time_of,
)
from pipeplan.remat.programs import judge, keep_all
from pipeplan.testing.joint_graphs import Gpt, gpt_graph
from pipeplan.testing.random_graphs import random_graph
from tests import grids

LIMITS = SearchLimits(seconds=60)


def _slots(seed: int, most: int, forwards: int = 4, backwards: int = 3) -> Slots:
    ledger = Ledger(random_graph(seed, forwards, backwards))
    return Slots(ledger, runs_of(ledger, most))


@pytest.mark.parametrize("seed", range(40))
def test_orders_do_what_the_judge_says(seed: int) -> None:
    """Bytes, saved bytes and time of an order are those of its program, for orders with reruns."""
    slots = _slots(seed, 2)
    ledger = slots.ledger
    again = [(slot, at) for at in range(4) for slot in slots.again(at)[seed % 3 : seed % 3 + 1]]
    for order in (ledger.first_order(), slots.order(again)):
        outcome = judge(ledger.graph, program(ledger, order))
        assert not outcome.violations
        assert outcome.peak_bytes == peak_bytes(ledger, order)
        assert outcome.saved_bytes == saved_bytes(ledger, order)
        assert outcome.compute_ns == time_of(ledger, order)
    assert (
        slots.order([(s, at) for at, all_ in slots.reruns(order).items() for s in all_]) == order
    )


@pytest.mark.parametrize("seed", range(6))
def test_what_is_received_may_go(seed: int) -> None:
    """A received storage is freed behind its last reader, and the optimum counts on it."""
    given = random_graph(seed, 4, 3)
    received = given.storages[0].model_copy(update={"kind": StorageKind.RECEIVED})
    graph = given.model_copy(update={"storages": (received, *given.storages[1:])})
    ledger = Ledger(graph)
    slots = Slots(ledger, runs_of(ledger, 2))
    first = ledger.first_order()
    kept = judge(graph, program(ledger, first))
    assert not kept.violations
    assert kept.peak_bytes == peak_bytes(ledger, first)
    assert kept.saved_bytes == saved_bytes(ledger, first)
    for peak in range(kept.peak_bytes // 2, kept.peak_bytes + 1, 4):
        best, found = best_order(slots, peak), search(slots, peak, None, LIMITS)
        assert (best is None) == (found.order is None)
        if best is not None and found.order is not None:
            assert further(ledger, best) == further(ledger, found.order)
            assert not judge(graph, program(ledger, found.order), peak).violations


def test_first_order_is_keep_all() -> None:
    """Every operation once is what the program without a plan does, to the byte."""
    graph = gpt_graph(Gpt(1))
    ledger = Ledger(graph)
    ours = judge(graph, program(ledger, ledger.first_order()))
    kept = judge(graph, keep_all(graph))
    assert not ours.violations
    assert (ours.peak_bytes, ours.saved_bytes) == (kept.peak_bytes, kept.saved_bytes)


@pytest.mark.parametrize("most", [2, 3])
@grids.first(5, seed=range(12))
def test_optimum_is_that_of_brute_force(seed: int, most: int) -> None:
    """At every peak that tells, with and without a saved budget."""
    slots = _slots(seed, most, forwards=3 if most == 3 else 4)
    ledger = slots.ledger
    first = bytes_during(ledger, ledger.first_order())
    least, highest = max(first) // 2, max(first)
    kept = saved_bytes(ledger, ledger.first_order())
    told = 0
    for peak in sorted({least + (highest - least) * share // 8 for share in range(1, 9)}):
        for saved in (None, kept // 2):
            best = best_order(slots, peak, saved)
            found = search(slots, peak, saved, LIMITS)
            assert found.proven
            assert (found.order is None) == (best is None)
            if best is None or found.order is None:
                continue
            told += 1
            assert further(ledger, found.order) == further(ledger, best) == found.bound_ns
            outcome = judge(ledger.graph, program(ledger, found.order), peak)
            assert not outcome.violations
            assert saved is None or outcome.saved_bytes <= saved
    assert told
