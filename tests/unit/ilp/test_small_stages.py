"""Partitions in small stages that offload: what they cost where work is counted."""

from __future__ import annotations

from pipeplan.ilp.contiguous.dynamic_program import ContiguousDP
from pipeplan.ilp.contiguous.small_stages import SmallStages
from tests.unit.ilp.test_offload import costs_of


def test_small_stages_count_against_the_limit() -> None:
    """All that is tried is charged, and nothing is tried where the time is over."""
    found = 0
    for seed in range(12):
        costs = costs_of(seed, 6, 3, 60)
        partition = ContiguousDP(costs, offload=True, small=True).shortest(1)
        if partition is None:
            continue
        charged: list[float] = []
        made = list(SmallStages(costs, charged.append, lambda: False).schedules(partition))
        found += any(schedule.offloads for schedule in made)
        assert len(charged) >= max(1, len(made))
        assert all(work > 0 for work in charged)
        ended = SmallStages(costs, charged.append, lambda: True).schedules(partition)
        assert not list(ended)
    assert found
