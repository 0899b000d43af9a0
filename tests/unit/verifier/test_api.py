"""The verifier's three functions: what they return, raise and leave out."""

from __future__ import annotations

import pytest

from pipeplan.cluster import uniform
from pipeplan.errors import InputError, InvalidPlanError
from pipeplan.plan import Solver
from pipeplan.verifier import Rule, Violation, audit, check, verify
from tests import handmade


def broken_rules(violations: tuple[Violation, ...]) -> set[Rule]:
    """The rules that are broken."""
    return {violation.rule for violation in violations}


def test_check_lists_all_and_carries_them() -> None:
    """`check` raises one error with every violation in it and attached."""
    broken = handmade.with_(
        handmade.base(), step_ns=1, chain_digest="x", memory=handmade.base().memory[:1]
    )
    with pytest.raises(InvalidPlanError, match="breaks memory, step, digests") as caught:
        check(broken)
    assert caught.value.violations == verify(broken)
    assert len(caught.value.violations) == 3
    assert str(caught.value).count("\n- ") == 3


def test_check_shows_the_first_and_counts_the_rest() -> None:
    """Hundreds of violations give a short text that says how many more there are."""
    chain = handmade.chain([(1, 1)] * 30)
    stages = [(i, i, 0) for i in range(30)]
    times = {f"{i}{kind}0": 0 for i in range(30) for kind in "FB"}
    plan = handmade.plan(chain, stages, 100, times, memory=())
    with pytest.raises(InvalidPlanError, match=r"and \d+ more") as caught:
        check(plan)
    assert len(caught.value.violations) > 20
    assert str(caught.value).count("\n") < 25


def test_audit_does_not_look_at_claims() -> None:
    """Memory, in-flight counts and step are told whatever the plan says of itself."""
    plan = handmade.base()
    empty = handmade.with_(
        plan, memory=(), step_ns=0, chain_digest="", solver=Solver(status="optimal")
    )
    told = audit(empty)
    assert (told.memory, told.step_ns) == (plan.memory, 240)
    # stage 0 stays 0..150 = 2.5 periods, stage 1 15..115, stage 2 41..80 of T = 60
    assert told.in_flight == (3, 2, 1)


def test_audit_refuses_plans_without_a_schedule() -> None:
    """Without sound ops there is nothing to audit: the violations are raised."""
    with pytest.raises(InvalidPlanError, match="0F0") as caught:
        audit(handmade.with_(handmade.base(), ops=handmade.base().ops[1:]))
    assert [v.rule for v in caught.value.violations] == [Rule.OPS]  # type: ignore[attr-defined]


def test_dependent_rules_are_left_out() -> None:
    """A plan without sound stages reports them and what stands alone, and nothing made up."""
    assert broken_rules(
        verify(
            handmade.with_(handmade.base(), stages=handmade.base().stages[::-1], chain_digest="x")
        )
    ) == {
        Rule.STAGES,
        Rule.DIGESTS,
    }
    assert broken_rules(verify(handmade.with_(handmade.base(), ops=()))) == {Rule.OPS}


def test_memory_is_not_judged_without_order() -> None:
    """Where ops of a GPU overlap, their bytes mean nothing: only the overlap is reported."""
    assert broken_rules(verify(handmade.moved(handmade.base(), "2B0", 69))) == {Rule.GPU}


def test_types_stay_usable() -> None:
    """A violation is one line of text that starts with the rule's name."""
    found = Violation(Rule.GPU, "GPU 0 at 1 ns", "got 1, need 2")
    assert str(found) == "gpu, GPU 0 at 1 ns: got 1, need 2"


def test_huge_numbers_never_raise() -> None:
    """The largest sizes, times and shifts a file may hold are judged in exact integers."""
    top, d = 2**62, 2**60
    layer = {"weight_bytes": top, "output_bytes": top, "saved_bytes": top}
    chain = handmade.chain([(d, d), (d, d)], [layer, layer])
    times = {"0F0": 0, "0SEND_F0": d, "1F0": 2 * d, "1B0": 3 * d, "1SEND_B0": 4 * d, "0B0": 5 * d}
    plan = handmade.plan(
        chain,
        [(0, 0, 0), (1, 1, 1)],
        top,
        times,
        cluster=uniform(2, top, latency_ns=d),
        durations={"0SEND_F": d, "1SEND_B": d},
        memory=(),
    )
    late = handmade.with_(handmade.changed(plan, "0B0", shift=10**6))
    found = {v.rule: v.message for v in verify(late)}
    assert found.keys() == {Rule.VERSIONS, Rule.MEMORY, Rule.BUDGET, Rule.STEP}
    # F starts at 0 and B ends at 2d, 10**6 periods later: one more at once, each keeps top bytes
    assert f"{10**6 + 1} are in flight" in found[Rule.VERSIONS]
    with pytest.raises(InputError, match="GPU 0: got a peak of"):
        audit(late)
