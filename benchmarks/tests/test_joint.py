"""The benchmark of joint plans: each way starts from the one before it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks import joint
from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.plan import Plan
from pipeplan.planner import Config, solve
from pipeplan.testing.instances import Case


def test_the_benchmark_hands_plans_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """None, joint, offload: each from the plan before; where one is missing all are measured."""
    seen: list[tuple[str, Plan | None]] = []

    def recorded(chain: Chain, cluster: Cluster, config: Config) -> Plan:
        seen.append((config.recompute + config.offload, config.resume))
        return solve(chain, cluster, replace(config, time_limit_s=0.2, deterministic=True))

    monkeypatch.setattr(joint, "solve", recorded)
    case = Case("resnet18", 2, 0.5, "exact")
    row = joint.measured(case, 1.0, {})
    assert [what for what, _ in seen] == ["offoff", "autooff", "autoauto"]
    starts = [plan for _, plan in seen]
    assert starts[0] is None
    assert starts[1] is not None
    assert starts[2] is not None
    assert starts[2].recomputes
    periods = [row[kind]["period_ns"] for kind in joint.GROWING]
    assert periods == sorted(periods, reverse=True)
    assert [float(plan.period_per_microbatch) for plan in starts[1:] if plan] == periods[:2]
    assert joint.measured(case, 1.0, row) == row
    assert len(seen) == 3
    joint.measured(case, 1.0, {name: part for name, part in row.items() if name != "offload"})
    assert len(seen) == 6
