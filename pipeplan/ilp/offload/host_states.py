"""Which stages of a schedule have their states on the host: as little to update there as fits.

A schedule's times do not depend on where states are (T5), so the choice comes last, and GPU by
GPU. What stages of a GPU must leave is a covering knapsack over the GPU's stages: least time of
updates whose bytes are enough. Its dynamic program counts bytes in `PARTS` of what must leave,
rounded against us. Source: ours; the update on the host is that of Ren et al. 2021 (ZeRO-Offload).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.memory import memory_rows
from pipeplan.ilp.schedule import Schedule
from pipeplan.plan import Stage

PARTS: Final = 64
"""Of the bytes that must leave a GPU: the dynamic program's unit."""


def with_states_placed(costs: CostModel, schedule: Schedule) -> Schedule:
    """The schedule with states on the host where their GPU has no room for them.

    Where even that is not enough, all states of the GPU are on the host.

    Args:
        costs: of states that stay on their GPUs unless a stage says otherwise.
        schedule: of any stages; where their states are is decided anew.
    """
    stages = [stage.model_copy(update={"states": "gpu"}) for stage in schedule.stages]
    schedule = replace(schedule, stages=tuple(stages))
    for row in memory_rows(costs, schedule):
        if row.peak_bytes > row.budget_bytes:
            own = [stage for stage in stages if stage.gpu == row.gpu]
            for stage in _leaving(costs, own, row.peak_bytes - row.budget_bytes):
                stages[stage.id] = stage.model_copy(update={"states": "host"})
    return replace(schedule, stages=tuple(stages))


def _leaving(costs: CostModel, stages: Sequence[Stage], missing: int) -> Sequence[Stage]:
    """Stages that free the missing bytes together in the least time of updates; else all."""
    best: list[tuple[int, tuple[Stage, ...]] | None] = [(0, ()), *[None] * PARTS]
    for stage in stages:
        freed = costs.movable(stage.first, stage.last)
        parts = min(PARTS, freed * PARTS // missing)
        time = costs.update_ns(stage.model_copy(update={"states": "host"}))
        for have in range(PARTS, -1, -1):
            known = best[have]
            if known is None or not parts:
                continue
            total, reach = known[0] + time, min(PARTS, have + parts)
            there = best[reach]
            if there is None or total < there[0]:
                best[reach] = total, (*known[1], stage)
    found = best[PARTS]
    return stages if found is None else found[1]
