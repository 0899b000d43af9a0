"""The terms of a replay add up to its ledger, which the verifier's closed form confirms."""

from __future__ import annotations

import functools
from collections import Counter

import pytest

from pipeplan import lowering, simulator
from pipeplan.errors import InputError
from pipeplan.memory_terms import GpuTerms, Purpose
from pipeplan.plan import MemoryRow, Plan
from pipeplan.testing.plans import random_plan
from pipeplan.testing.plans_split import random_split_plan
from tests import handmade

ROWS: dict[str, tuple[Purpose, ...]] = {
    "states": (
        Purpose.WEIGHTS,
        Purpose.OLDER_WEIGHTS,
        Purpose.GRADIENTS,
        Purpose.WAITING_GRADIENTS,
        Purpose.OPTIMIZER,
    ),
    "saved": (Purpose.SAVED, Purpose.SAVED_FOR_W),
    "working": (
        Purpose.UPDATE,
        Purpose.WORK_F,
        Purpose.WORK_B,
        Purpose.WORK_I,
        Purpose.WORK_W,
    ),
    "direct": (Purpose.DIRECT_F, Purpose.DIRECT_B),
    "message": (Purpose.SENT_F, Purpose.SENT_B, Purpose.RECEIVED_F, Purpose.RECEIVED_B),
}
"""What each column of a plan's memory table is the sum of."""


@functools.cache
def plans() -> tuple[Plan, ...]:
    """Both semantics and memory models; recomputed, offloaded, split in halves, whole steps."""
    drawn = [random_plan(seed, offload=seed % 3 == 0) for seed in range(40)]
    return (*drawn, *(random_split_plan(seed) for seed in range(40)))


@functools.cache
def simulations() -> tuple[tuple[Plan, simulator.Simulation], ...]:
    """Each of the plans and its replay."""
    return tuple((plan, replayed(plan)) for plan in plans())


def replayed(plan: Plan) -> simulator.Simulation:
    """On the plan's clock."""
    return simulator.simulate(plan, lowering.lower(plan))


def check(memory: GpuTerms, row: MemoryRow) -> None:
    """Column by column, to the byte."""
    sizes = {
        name: sum(term.size for term in memory.peak.terms if term.purpose in purposes)
        for name, purposes in ROWS.items()
    }
    assert sizes == {name: getattr(row, f"{name}_bytes") for name in ROWS}
    assert memory.peak.size == row.peak_bytes
    assert memory.host_size == row.host_bytes


def test_terms_add_up_to_the_rows_that_the_verifier_confirms() -> None:
    """Each column is the sum of its terms at the peak; no instant is larger, none comes twice."""
    for plan in plans():
        simulation = simulator.check(plan, lowering.lower(plan))
        for gpu, row in enumerate(plan.memory):
            memory = simulation.terms(gpu)
            check(memory, row)
            sizes = [instant.size for instant in memory.instants]
            assert sizes == sorted(sizes, reverse=True)
            assert len({instant.kind for instant in memory.instants}) == len(sizes)
            assert memory.peak.action == simulation.peaks[gpu].event
            assert {term.stage for instant in memory.instants for term in instant.terms} <= {
                stage.id for stage in plan.hosted(gpu)
            }


def test_saved_bytes_are_those_of_micro_batches_in_flight() -> None:
    """What is saved is bytes of a micro-batch times micro-batches, never more than in flight."""
    for plan, simulation in simulations():
        if plan.memory_model == "paper":
            continue
        for gpu in range(len(plan.cluster.gpus)):
            for instant in simulation.terms(gpu).instants:
                held: Counter[int] = Counter()
                for term in instant.terms:
                    if term.purpose is Purpose.SAVED:
                        held[term.stage] += term.count
                assert all(n <= simulation.in_flight[stage] for stage, n in held.items())


def test_a_curve_is_the_level_of_each_event() -> None:
    """Stacked by purpose it is what the ledger holds, event by event of one period."""
    for plan, simulation in simulations()[::4]:
        for gpu in range(len(plan.cluster.gpus)):
            curve = simulation.terms(gpu).curve
            assert curve.times_ns[0] == 0
            assert list(curve.times_ns) == sorted(curve.times_ns)
            assert curve.times_ns[-1] < plan.period_ns
            totals = {size for _, size in simulation.levels(gpu)}
            if plan.memory_model == "exact":
                assert {sum(row) for row in curve.sizes[1:]} <= totals


def test_each_term_is_seen() -> None:
    """The plans above have something of every term that a plan can have."""
    seen = {
        term.purpose
        for plan, simulation in simulations()
        for memory in map(simulation.terms, range(len(plan.cluster.gpus)))
        for instant in memory.instants
        for term in instant.terms
    }
    assert seen == set(Purpose) - {Purpose.OTHER}


def test_a_peak_after_all_time_is_refused() -> None:
    """An update some periods behind a very long one has no place in a report."""
    chain = handmade.chain([(1, 1)], [{"optimizer_workspace_bytes": 5}])
    plan = handmade.packed(chain, [(0, 0, 0)], 2**60, semantics="flush", microbatches=2)
    with pytest.raises(InputError, match=r"replay: got a peak .* ns after the first action"):
        replayed(plan).terms(0)
