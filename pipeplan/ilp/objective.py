"""What is minimized: the period per micro-batch (2bw) or the step time (flush), (T5), (U5)."""

from __future__ import annotations

from fractions import Fraction

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.schedule import Schedule, duration
from pipeplan.plan import Stage
from pipeplan.units import ceil_div


def step_ns(costs: CostModel, schedule: Schedule, microbatches: int) -> int:
    """(T5): plan-clock time of one optimizer step of `microbatches` micro-batches."""
    update = optimizer_ns(costs, schedule.stages)
    period, k = schedule.period, schedule.k
    if costs.semantics == "2bw":
        return ceil_div(microbatches * period, k) + update
    latest = max(
        times[copy]
        + duration(costs, schedule.stages, op)
        + (microbatches - 1 - copy) // k * period
        for op, times in schedule.times.items()
        for copy in range(min(k, microbatches))
    )
    earliest = min(min(times[:microbatches]) for times in schedule.times.values())
    return latest - earliest + update


def optimizer_ns(costs: CostModel, stages: tuple[Stage, ...]) -> int:
    """The slowest GPU's update of all layers it hosts."""
    totals = [0] * costs.gpus
    for stage in stages:
        totals[stage.gpu] += costs.update_ns(stage)
    return max(totals)


def cost(costs: CostModel, schedule: Schedule, microbatches: int) -> tuple[Fraction, Fraction]:
    """Smaller is better: what the semantics minimize; equal ones by how simple they are.

    Where states may be on the host the step counts under 2bw, too: its updates may take longer
    than what a shorter period saves.
    """
    period = schedule.per_microbatch
    if costs.semantics == "2bw":
        if costs.states_away:
            period += Fraction(optimizer_ns(costs, schedule.stages), microbatches)
        return period, Fraction(schedule.k * len(schedule.stages))
    return Fraction(step_ns(costs, schedule, microbatches)), period
