"""The examples of paper 002 once more: whatever the verifier says of a plan, the replay says too.

Runs every test of the verifier's file with `verify` and `audit` watched: a plan that keeps all
rules must replay to the numbers it claims, one that breaks a rule must not, and counts of
micro-batches in flight are read off the replay.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pipeplan import simulator, verifier
from pipeplan.errors import PipeplanError
from pipeplan.lowering import lower
from pipeplan.plan import Plan
from tests.golden import test_paper_examples_verifier as examples
from tests.golden.test_paper_examples_verifier import (
    TestContiguousAndNot,
    TestMoreThanOneMicrobatchPerPeriod,
    TestShifts,
)

__all__ = ["TestContiguousAndNot", "TestMoreThanOneMicrobatchPerPeriod", "TestShifts"]


@pytest.fixture(autouse=True)
def _watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    watched: list[Plan] = []

    def verify(plan: Plan) -> tuple[verifier.Violation, ...]:
        watched.append(plan)
        return _verify(plan)

    monkeypatch.setattr(examples, "verify", verify)
    monkeypatch.setattr(examples, "audit", _audit)
    yield
    assert watched, "the test judged no plan"


def _verify(plan: Plan) -> tuple[verifier.Violation, ...]:
    violations = verifier.verify(plan)
    if violations:
        with pytest.raises(PipeplanError):
            simulator.check(plan, lower(plan))
    else:
        assert simulator.check(plan, lower(plan)).period_ns == plan.period_ns
    return violations


def _audit(plan: Plan) -> verifier.Audit:
    found = verifier.audit(plan)
    simulation = simulator.simulate(plan, lower(plan))
    assert simulation.in_flight == found.in_flight
    assert simulation.memory == found.memory
    assert simulation.step_ns == found.step_ns
    return found
