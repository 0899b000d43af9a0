"""What is minimized: the period per micro-batch (2bw) or the step (flush): (T5), (U5), (U7)."""

from __future__ import annotations

from fractions import Fraction

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.schedule import OpId, Schedule, duration
from pipeplan.plan import OpKind
from pipeplan.units import ceil_div


def step_ns(costs: CostModel, schedule: Schedule, microbatches: int) -> int:
    """(T5): plan-clock time of one optimizer step of `microbatches` micro-batches."""
    update = optimizer_ns(costs, schedule, microbatches)
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


def optimizer_ns(costs: CostModel, schedule: Schedule, microbatches: int) -> int:
    """The slowest GPU's update of all layers it hosts, but for what runs beside it (U7)."""
    held, behind = [0] * costs.gpus, [0] * costs.gpus
    room: list[int | None] = [None] * costs.gpus
    offloading = {stage.gpu for stage in schedule.stages if stage.offloads}
    offloading |= {schedule.stages[each.stage].gpu for each in schedule.offloads}
    for stage in schedule.stages:
        gpu, rest = stage.gpu, costs.behind_ns(stage)
        if gpu in offloading:
            rest = 0
        held[gpu] += costs.update_ns(stage) - rest
        if rest:
            behind[gpu] += rest
            found, known = _room_ns(costs, schedule, stage.id, microbatches), room[gpu]
            room[gpu] = found if known is None else min(known, found)
    return max(
        total if left is None else total + max(0, rest - left)
        for total, rest, left in zip(held, behind, room, strict=True)
    )


def _room_ns(costs: CostModel, schedule: Schedule, stage: int, microbatches: int) -> int:
    """v(s) of (U7): from an update to the next one, or to the first forward that reads it."""
    forward, backward = (OpKind.F, stage), (OpKind.B, stage)
    lasts = duration(costs, schedule.stages, backward)

    def start(op: OpId, microbatch: int) -> int:
        periods, copy = divmod(microbatch, schedule.k)
        return schedule.times[op][copy] + periods * schedule.period

    return min(
        min(
            start(forward, last + microbatches + 1) - lasts,
            start(backward, last + microbatches),
        )
        - start(backward, last)
        for last in range(schedule.k)
    )


def cost(costs: CostModel, schedule: Schedule, microbatches: int) -> tuple[Fraction, Fraction]:
    """Smaller is better: what the semantics minimize; equal ones by how simple they are.

    Where states may be on the host the step counts under 2bw, too: its updates may take longer
    than what a shorter period saves.
    """
    period = schedule.per_microbatch
    if costs.semantics == "2bw":
        if costs.states_away:
            period += Fraction(optimizer_ns(costs, schedule, microbatches), microbatches)
        return period, Fraction(schedule.k * len(schedule.stages))
    return Fraction(step_ns(costs, schedule, microbatches)), period
