"""Backwards in two halves: verifier and simulator must say the same of every such plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeplan import lowering, simulator
from pipeplan.plan import OpKind, Plan, Stage
from pipeplan.testing.plans_split import random_split_plan
from pipeplan.verifier import audit, verify
from tests import mutations_split
from tests.mutations import mutate
from tests.voices import counted_slots, never_later_never_higher, replay_accepts

SEEDS = st.integers(0, 2**32)
FEW = settings(max_examples=30, derandomize=True, deadline=None)
MANY = settings(max_examples=60, derandomize=True, deadline=None)


@MANY
@given(SEEDS)
def test_the_voices_agree_on_split_plans(seed: int) -> None:
    """Rows, in-flight counts, step and period are equal; every byte is given back."""
    plan = random_split_plan(seed)
    assert verify(plan) == ()
    simulation = simulator.check(plan, lowering.lower(plan))
    found = audit(plan)
    assert simulation.memory == found.memory
    assert simulation.in_flight == found.in_flight
    assert (simulation.period_ns, simulation.step_ns) == (plan.period_ns, found.step_ns)
    for gpu, steady in enumerate(simulation.steady_peak_bytes):
        assert simulation.fill_peak_bytes[gpu] <= steady
        assert simulation.drain_peak_bytes[gpu] <= steady
    assert not any(simulation.left_bytes)


@FEW
@given(SEEDS)
def test_eager_is_never_later_and_never_higher(seed: int) -> None:
    """(O7) holds with W among the computes of a rank."""
    never_later_never_higher(random_split_plan(seed))


@FEW
@given(SEEDS)
def test_lowered_programs_end_with_blocking_sends(seed: int) -> None:
    """(O6): no circle of waits, in the flow and across the updates of steps."""
    plan = random_split_plan(seed)
    pattern = lowering.lower(plan)
    assert lowering.wait_cycle(pattern, blocking=True) is None
    simulator.replay(plan, pattern.unroll(2 * plan.microbatches), updates=True)


@FEW
@given(SEEDS)
def test_slots_hold_every_message(seed: int) -> None:
    """I takes gradients in and makes the next ones, as B does."""
    pattern = lowering.lower(random_split_plan(seed))
    assert counted_slots(pattern) == lowering.buffer_slots(pattern)


@settings(max_examples=80, derandomize=True, deadline=None)
@given(SEEDS)
def test_mutants_are_judged_alike(seed: int) -> None:
    """A changed plan is rejected by both voices or accepted by both."""
    _, mutant = mutate(random_split_plan(seed), Random(seed))
    assert replay_accepts(mutant) == (verify(mutant) == ())


@MANY
@given(SEEDS)
def test_mutants_of_the_halves_are_judged_alike(seed: int) -> None:
    """So is a plan that changes in what only split backwards have."""
    rng = Random(seed)
    kind = rng.choice(mutations_split.CHANGES).__name__
    _, mutant = mutate(random_split_plan(seed), rng, kind)
    assert replay_accepts(mutant) == (verify(mutant) == ())


def test_mutations_are_worth_the_name() -> None:
    """Every kind of change is rejected for some plan, and most are accepted for others."""
    plan = cache(random_split_plan)

    def verdicts(kind: str) -> Iterator[bool]:
        for seed in range(200):
            changed = mutate(plan(seed), Random(seed), kind)[1]
            if changed != plan(seed):
                yield verify(changed) == ()

    for change in mutations_split.CHANGES:
        assert not all(verdicts(change.__name__)), change.__name__
    for change in (mutations_split.weights_moved, mutations_split.weights_cost_more):
        assert any(verdicts(change.__name__)), change.__name__


def test_random_split_plans_differ_in_kind() -> None:
    """Among 300 seeds: steps and periods, host, recomputing, each hard case of the bytes."""
    seen: Counter[str] = Counter()
    for seed in range(300):
        seen.update(_traits(random_split_plan(seed)))
        if min(seen[trait] for trait in _TRAITS) >= 4:
            return
    raise AssertionError(seen)


_TRAITS = (
    "split", "step", "period", "host", "again", "shared", "weights first", "weights last",
    "no length", "half", "wrap", "mixed",
)  # fmt: skip


def _traits(plan: Plan) -> Iterator[str]:
    if not plan.splits:
        return
    whole = plan.k == plan.microbatches and not any(op.shift for op in plan.ops)
    there = {
        "split": True,
        "step" if whole else "period": True,
        "host": any(op.kind.is_host for op in plan.ops),
        "wrap": any(op.start_ns + op.duration_ns > plan.period_ns for op in plan.ops),
        "no length": any(op.kind is OpKind.W and not op.duration_ns for op in plan.ops),
        "half": plan.cluster.links.duplex == "half",
        "mixed": any(not stage.split_backward for stage in plan.stages[1:]),
    }
    yield from (trait for trait, holds in there.items() if holds)
    for stage in plan.stages:
        if stage.split_backward:
            yield from _bytes_traits(plan, stage)


def _bytes_traits(plan: Plan, stage: Stage) -> Iterator[str]:
    """Runs, and an input of W that the stage before keeps as well, (S3)."""
    if stage.remat and stage.remat.recompute:
        yield "again"
    before, first = plan.stages[stage.id - 1], plan.chain.layers[stage.first]
    above = plan.chain.layers[before.last].saved_output_bytes
    light = before.remat and any(last == before.last for _, last in before.remat.recompute)
    if before.gpu == stage.gpu and min(above, first.saved_input_for_weight_bytes) and not light:
        yield "shared"
        weights, back = (
            next(op for op in plan.ops if (op.kind, op.stage, op.copy_) == (kind, s, 0))
            for kind, s in ((OpKind.W, stage.id), (before.backward, before.id))
        )
        first_is_w = (weights.shift, weights.start_ns) < (back.shift, back.start_ns)
        yield "weights first" if first_is_w else "weights last"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_voices_agree_on_many_split_plans_and_mutants() -> None:
    """Ten thousand plans and as many mutants."""
    for seed in range(10**6, 10**6 + 10**4):
        plan = random_split_plan(seed)
        simulator.check(plan, lowering.lower(plan))
        _, mutant = mutate(plan, Random(seed))
        assert replay_accepts(mutant) == (verify(mutant) == ()), seed
