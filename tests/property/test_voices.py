"""Verifier and simulator, two voices that share no formula, must say the same of every plan."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeplan import lowering, simulator
from pipeplan.plan import Plan
from pipeplan.testing import plans
from pipeplan.verifier import audit, verify
from tests import mutations_split
from tests.host_updates import beside
from tests.mutations import MUTATIONS, mutate
from tests.voices import counted_slots, never_later_never_higher, replay_accepts

random_plan = partial(plans.random_plan, programs=True)
SEEDS = st.integers(0, 2**32)
FEW = settings(max_examples=30, derandomize=True, deadline=None)
MANY = settings(max_examples=60, derandomize=True, deadline=None)


@MANY
@given(SEEDS)
def test_the_voices_agree_on_valid_plans(seed: int) -> None:
    """Period, step, in-flight counts and every term of every peak are equal, in integers."""
    plan = random_plan(seed)
    assert verify(plan) == ()
    simulation = simulator.check(plan, lowering.lower(plan))
    found = audit(plan)
    assert simulation.period_ns == plan.period_ns
    assert simulation.step_ns == found.step_ns
    assert simulation.memory == found.memory
    assert simulation.in_flight == found.in_flight


@FEW
@given(SEEDS)
def test_updates_beside_are_judged_alike(seed: int) -> None:
    """(U7): the same step, and none is longer on the eager clock, with updates that take time."""
    plan = beside(seed)
    assert verify(plan) == ()
    pattern = lowering.lower(plan)
    assert simulator.check(plan, pattern).step_ns == plan.step_ns
    eager = simulator.simulate(plan, pattern, clock="eager", updates=True)
    assert eager.step_ns is None or eager.step_ns <= plan.step_ns


@FEW
@given(SEEDS)
def test_nothing_is_left_and_fill_and_drain_stay_below(seed: int) -> None:
    """Fill and drain hold subsets of the steady state's bytes, and every byte is given back."""
    plan = random_plan(seed, offload=seed % 2 == 0)
    simulation = simulator.simulate(plan, lowering.lower(plan))
    for gpu, steady in enumerate(simulation.steady_peak_bytes):
        assert simulation.fill_peak_bytes[gpu] <= steady
        assert simulation.drain_peak_bytes[gpu] <= steady
    assert not any(simulation.left_bytes)


@FEW
@given(SEEDS)
def test_eager_is_never_later_and_never_higher(seed: int) -> None:
    """(O7): eager starts and ends no op later than planned, with the same peak on every GPU."""
    plan = random_plan(seed, memory_model="exact", offload=seed % 2 == 0)
    never_later_never_higher(plan)


@FEW
@given(SEEDS)
def test_lowered_programs_end_with_blocking_sends(seed: int) -> None:
    """(O6): no circle of waits, in the flow and across the updates of both modes."""
    plan = random_plan(seed, offload=seed % 2 == 0)
    pattern = lowering.lower(plan)
    assert lowering.wait_cycle(pattern, blocking=True) is None
    simulator.replay(plan, pattern.unroll(2 * plan.microbatches), updates=True)


@FEW
@given(SEEDS)
def test_slots_hold_every_message(seed: int) -> None:
    """`buffer_slots` is what a run of the lists needs, message by message: counted one by one."""
    pattern = lowering.lower(random_plan(seed))
    slots = lowering.buffer_slots(pattern)
    assert counted_slots(pattern) == slots


@settings(max_examples=80, derandomize=True, deadline=None)
@given(SEEDS)
def test_mutants_are_judged_alike(seed: int) -> None:
    """A changed plan is rejected by both voices or accepted by both."""
    _, mutant = mutate(random_plan(seed), Random(seed))
    assert replay_accepts(mutant) == (verify(mutant) == ())


def test_mutations_are_worth_the_name() -> None:
    """Every kind of change is rejected for some plan, and those of times accepted for others."""

    @cache
    def plan(seed: int) -> Plan:
        if seed < 100:
            return random_plan(seed)
        return random_plan(seed - 100, memory_model="exact", offload=True)

    def verdicts(kind: str) -> Iterator[bool]:
        for seed in range(300):
            yield verify(mutate(plan(seed), Random(seed), kind)[1]) == ()

    halves = {change.__name__ for change in mutations_split.CHANGES}  # see test_voices_split.py
    for kind in dict(MUTATIONS).keys() - {"nothing", "all_rotated"} - halves:
        assert not all(verdicts(kind)), kind
    for kind in ("nothing", "all_rotated", "start_moved", "shift_changed", "ops_swapped"):
        assert any(verdicts(kind)), kind
    for kind in ("copy_kept", "host_op_moved", "host_duplex_changed", "host_gone"):
        assert any(verdicts(kind)), kind


def test_random_plans_offload_in_many_ways() -> None:
    """Full and half ways, two stages on one, some copies only, beside recomputed runs."""
    every = {"2bw", "flush", "full", "half", "shared", "some", "again"}
    seen: set[str] = set()
    for plan in (random_plan(seed, memory_model="exact", offload=True) for seed in range(150)):
        sending = [s for s in plan.stages if s.remat and s.remat.offload]
        if not sending or plan.cluster.host is None:
            continue
        seen |= {plan.semantics, plan.cluster.host.duplex}
        pairs = {(op.stage, op.copy_) for op in plan.ops if op.kind.is_host}
        if len({stage.gpu for stage in sending}) < len(sending):
            seen.add("shared")
        if len(pairs) < plan.k * len(sending):
            seen.add("some")
        if any(stage.remat and stage.remat.recompute for stage in sending):
            seen.add("again")
        if seen == every:
            return
    raise AssertionError(every - seen)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_voices_agree_on_many_plans_and_mutants() -> None:
    """Ten thousand plans and as many mutants."""
    for seed in range(10**6, 10**6 + 10**4):
        plan = random_plan(seed)
        simulator.check(plan, lowering.lower(plan))
        _, mutant = mutate(plan, Random(seed))
        assert replay_accepts(mutant) == (verify(mutant) == ()), seed


@FEW
@given(SEEDS)
def test_the_voices_agree_on_plans_that_offload_and_their_mutants(seed: int) -> None:
    """Rows and verdicts are equal where ways to the host are busy as well."""
    plan = random_plan(seed, memory_model="exact", offload=True)
    assert simulator.check(plan, lowering.lower(plan)).memory == audit(plan).memory
    _, mutant = mutate(plan, Random(seed))
    assert replay_accepts(mutant) == (verify(mutant) == ())
