"""Replays of backwards in two halves: bytes event by event, programs, and how many steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pipeplan import simulator
from pipeplan.errors import DeadlockError, InputError, InvalidPlanError
from pipeplan.lowering import lower
from pipeplan.plan import OpKind, Plan
from pipeplan.program import ActionKind, Program
from pipeplan.simulator.tape import Ops, number
from pipeplan.testing.plans_split import random_split_plan
from tests import handmade
from tests.handmade_split import EARLY, LATE, one_gpu, two_gpus


def levels(times: dict[str, int]) -> list[tuple[int, int]]:
    """(ns, bytes) after every event of one step on one GPU, its update left out."""
    plan = one_gpu(times)
    simulation = simulator.simulate(plan, lower(plan), microbatches=1)
    return list(simulation.levels(0))[:10]


def test_bytes_after_every_event() -> None:
    """W behind 0B: what it needs of stage 0's output is stage 0's until 0B starts.

    A(0) = 5, 8 - 3 = 5 beside it until 1F; pF(1) = 19 = A(1); pI = 34; G = 12, 3 of them above;
    the gradient of 8 until 0B; pB(0) = 2 + 3 + 8; pW = 14.
    """
    assert levels(LATE) == [
        (0, 10), (1, 10), (1, 5 + 19), (3, 5 + 19), (3, 5 + 34), (6, 5 + 9 + 8),
        (6, 13 + 12), (7, 12), (7, 14), (9, 0),
    ]  # fmt: skip


def test_bytes_after_every_event_of_an_early_w() -> None:
    """W before 0B: it never counts the 3 bytes, and 0B finds nothing of it."""
    assert levels(EARLY) == [
        (0, 10), (1, 10), (1, 5 + 19), (3, 5 + 19), (3, 5 + 34), (6, 5 + 9 + 8),
        (6, 5 + 14 - 3 + 8), (8, 5 + 8), (8, 13), (9, 0),
    ]  # fmt: skip


def test_a_step_plan_is_replayed_for_three_steps() -> None:
    """One step before the one that counts, one behind it; each number of the plan is confirmed."""
    plan = two_gpus()
    simulation = simulator.check(plan, lower(plan))
    assert simulation.microbatches == 3 * plan.k
    assert simulation.period_ns == plan.period_ns == 15
    assert simulation.memory == plan.memory
    assert simulation.in_flight == (2, 2)


def test_three_steps_say_what_more_would() -> None:
    """Rows, period, step and in-flight counts of step plans do not change with ten steps more."""
    for seed in range(40):
        plan = random_split_plan(seed, step=True)
        few = simulator.simulate(plan, lower(plan))
        many = simulator.simulate(plan, lower(plan), microbatches=13 * plan.k)
        assert few.microbatches == 3 * plan.k
        for name in ("memory", "period_ns", "step_ns", "in_flight"):
            assert getattr(few, name) == getattr(many, name), (seed, name)


def test_a_pattern_that_reaches_further_is_replayed_for_longer() -> None:
    """Three steps bound nothing where receives are posted four steps early."""
    plan = two_gpus()
    pattern = lower(plan)
    early = tuple(
        replace(action, shift=-4) if action.kind is ActionKind.RECV_F else action
        for action in pattern.ranks[1]
    )
    pattern = replace(pattern, ranks=(pattern.ranks[0], early))
    simulation = simulator.simulate(plan, pattern, microbatches=None, clock="eager")
    assert simulation.microbatches > 9 * plan.k


def test_plans_that_are_no_steps_are_replayed_as_before() -> None:
    """K = m = 1, a backward that crosses the period, or 2bw: no step plans."""
    of = handmade.chain([(2, 2)])
    for fields in ({"semantics": "2bw"}, {"semantics": "flush", "microbatches": 2}):
        plan = handmade.packed(of, [(0, 0, 0)], 4, **{"microbatches": 1} | fields)
        assert simulator.simulate(plan, lower(plan)).microbatches > 10
    crossing = handmade.plan(
        of, [(0, 0, 0)], 4, {"0F0": 0, "0B0": 3}, microbatches=1, semantics="flush", memory=()
    )
    plan = handmade.moved(crossing, "0B0", 6)
    assert simulator.simulate(plan, lower(plan)).microbatches > 10


def test_w_waits_for_i_in_a_written_program() -> None:
    """A W that stands behind its I ends; one that a rank has before it never starts."""
    plan = one_gpu()
    good = Program.parse("0F0 1F0 1I0 1W0 0B0\n")
    assert simulator.replay(plan, good).makespan_ns == 9
    with pytest.raises(DeadlockError, match="1W0 waits for 1I0"):
        simulator.replay(plan, Program.parse("0F0 1F0 1W0 1I0 0B0\n"))
    with pytest.raises(InputError, match="1B0, which the plan has on no rank"):
        simulator.replay(plan, Program.parse("0F0 1F0 1B0 0B0\n"))


def flagged(plan: Plan, stage: int) -> Plan:
    """`plan` whose `stage` is said to be split."""
    stages = list(plan.stages)
    stages[stage] = stages[stage].model_copy(update={"split_backward": True})
    return plan.model_copy(update={"stages": tuple(stages)})


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (flagged(one_gpu(), 0), "start of the chain"),
        (one_gpu().model_copy(update={"semantics": "2bw"}), "need flush"),
        (one_gpu().model_copy(update={"memory_model": "paper"}), "need flush, exact"),
        (flagged(handmade.base(semantics="flush"), 1), "do not tell"),
    ],
)
def test_where_no_backward_can_be_split(plan: Plan, text: str) -> None:
    """(S1), by the replay itself."""
    whole = handmade.base(semantics="flush")
    with pytest.raises(InvalidPlanError, match=text):
        simulator.simulate(plan, lower(whole))


def test_spans_show_both_halves() -> None:
    """What the trace of a replay draws."""
    plan = one_gpu()
    spans = simulator.simulate(plan, lower(plan), microbatches=1).spans()
    found = {(each.kind, each.stage): (each.start_ns, each.end_ns) for each in spans}
    assert found[OpKind.I, 1] == (3, 6)
    assert found[OpKind.W, 1] == (7, 9)
    assert (OpKind.B, 1) not in found


def test_positions() -> None:
    """(T1), (S1): I where B was, W behind all that a micro-batch does, the host's ops included."""
    ops = Ops.of(two_gpus())
    places = {(kind, s): ops.position[number(kind, s)] for kind in OpKind for s in (0, 1)}
    assert places[OpKind.I, 1] == places[OpKind.B, 1] == 3
    assert (places[OpKind.W, 0], places[OpKind.W, 1]) == (12, 13)
    others = (at for (kind, _), at in places.items() if kind is not OpKind.W)
    assert max(others) == places[OpKind.PREFETCH, 1] == 11
