"""The interval formulation: equal to brute force, within its budgets by the judge."""

from __future__ import annotations

import pytest

from pipeplan.operator_graph import OperatorGraph, StorageKind
from pipeplan.remat.graph.brute_force import best_order
from pipeplan.remat.graph.intervals.search import SearchLimits, search
from pipeplan.remat.graph.intervals.slots import Slots, runs_of
from pipeplan.remat.graph.ledger import Ledger, Order
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


def _slots(seed: int, most: int, forwards: int = 4, backwards: int = 3, largest: int = 9) -> Slots:
    ledger = Ledger(random_graph(seed, forwards, backwards, largest))
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


@pytest.mark.parametrize("seed", range(4))
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
@grids.first(2, seed=(0, 3, 1, 2, *range(4, 12)))
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


@pytest.mark.parametrize("seed", range(8))
def test_a_byte_more_or_less_decides(seed: int) -> None:
    """Sizes of up to a GiB without a common divisor are not rounded: proofs hold to the byte."""
    slots = _slots(seed, 2, largest=2**30)
    known: Order | None = slots.ledger.first_order()
    while known is not None:
        peak = peak_bytes(slots.ledger, known)
        exact = search(slots, peak, None, LIMITS)
        assert exact.proven
        assert exact.bound_ns == further(slots.ledger, known)
        below = search(slots, peak - 1, None, LIMITS)
        known = best_order(slots, peak - 1, None)
        assert below.proven
        assert below.bound_ns == (None if known is None else further(slots.ledger, known))


def test_more_units_than_64_bits_hold_prove_nothing() -> None:
    """Sizes are rounded up then: what is found keeps the budget."""
    slots = _slots(3, 2, largest=2**50)
    peak = peak_bytes(slots.ledger, slots.ledger.first_order())
    for budget in (peak, peak - 1, peak // 2):
        found = search(slots, budget, None, LIMITS)
        assert not found.proven
        assert found.order is None or peak_bytes(slots.ledger, found.order) <= budget
        assert found.bound_ns == 0


def test_an_output_that_is_handed_back_may_be_made_anew() -> None:
    """It need not be held from its first run on."""
    sizes = (3, 6, 3, 4, 7, 5, 2)
    kinds = ("input", "tangent", *["activation"] * 3, *["gradient"] * 2)
    runs = (
        ("F", [0], [2], 9, 2),
        ("F", [0, 2], [3], 1, 3),
        ("F", [0, 2, 3], [4], 1, 0),
        ("I", [1, 2], [5], 9, 0),
        ("I", [5], [6], 8, 2),
    )
    graph = OperatorGraph.from_data(
        {
            "format": "pipeplan-operators/1",
            "name": "handed back",
            "storages": [
                {"name": f"s{i}", "bytes": size, "kind": kind}
                for i, (size, kind) in enumerate(zip(sizes, kinds, strict=True))
            ],
            "operations": [
                {
                    "name": f"o{i}",
                    "phase": phase,
                    "reads": reads,
                    "writes": writes,
                    "time_ns": time,
                    "workspace_bytes": bytes_,
                }
                for i, (phase, reads, writes, time, bytes_) in enumerate(runs)
            ],
            "outputs": [4],
            "input_gradients": [4],
        }
    )
    ledger = Ledger(graph)
    slots = Slots(ledger, runs_of(ledger, 2))
    best = best_order(slots, 23, None)
    found = search(slots, 23, None, LIMITS)
    assert best is not None
    assert found.proven
    assert found.bound_ns == further(ledger, best) == 1
