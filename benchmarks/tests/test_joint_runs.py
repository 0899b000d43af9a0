"""Joint plans on four processes, in planned time: what benchmarks/joint_runs.py prints holds."""

from __future__ import annotations

import pytest

from benchmarks import joint_runs
from pipeplan.plan import Semantics


@pytest.mark.long
@pytest.mark.parametrize("name", joint_runs.TASKS)
@pytest.mark.parametrize("semantics", ["flush", "2bw"])
def test_joint_plans_train_as_planned(name: str, semantics: Semantics) -> None:
    """Weights are those of one process; bytes are within 3 % below the plan's, and its budget.

    The period is never faster than ops and links allow; how much slower a busy machine makes it
    is the benchmark's to say.
    """
    found = joint_runs.case(name, joint_runs.profiled(name), 0.5, semantics)
    assert found["runs"]
    assert found["equal"]
    assert 1.0 <= found["peak_least"] <= found["peak_most"] <= 1.03
    assert found["over"] <= 1.0
    assert 0.5 <= found["period"] <= 1.01
