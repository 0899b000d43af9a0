"""Start times for a contiguous partition.

V of a stage is fixed by the partition; where it exceeds the work inside, something waits. Either
the forward half runs as early as possible and gradients wait, or the backward half runs without a
wait and forwards do; both keep the same counts and differ in where tensors lie meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipeplan.ilp.contiguous.dynamic_program import ContiguousPartition
from pipeplan.ilp.contiguous.recurrence import extend_one_span
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.schedule import OpId, Schedule, chain_ops, duration
from pipeplan.plan import OpKind


def schedule_partition(
    costs: CostModel,
    partition: ContiguousPartition,
    *,
    gradients_wait: bool = True,
    lengths: Mapping[OpId, int] | None = None,
) -> Schedule:
    """A schedule of the partition at its period; it keeps (R2)-(R5), memory is to be counted.

    Args:
        costs: durations.
        partition: cuts and V of each stage, in ns.
        gradients_wait: which half does.
        lengths: ns of F and B that take longer than those of one stage would.
    """
    stages, period = partition.stages, partition.period
    length = {op: duration(costs, stages, op) for op in chain_ops(stages)} | dict(lengths or {})
    begin: dict[OpId, int] = {}
    forward_end = backward_start = 0
    for stage in stages:
        # both clocks meet the stage from outside: in front of its F, behind its B
        span = partition.spans[stage.id]
        f, b = (OpKind.F, stage.id), (OpKind.B, stage.id)
        if gradients_wait:
            begin[f] = forward_end
            begin[b] = begin[f] + span - length[b]
        else:
            begin[b] = backward_start - length[b]
            begin[f] = begin[b] + length[b] - span
        forward_end, backward_start = begin[f] + length[f], begin[b]
        if stage.id + 1 == len(stages):
            break
        e, g = (OpKind.SEND_F, stage.id), (OpKind.SEND_B, stage.id + 1)
        trip = trip_span(costs, partition.spans[stage.id + 1], length[e] + length[g], period)
        if gradients_wait:
            begin[e] = forward_end
            begin[g] = begin[e] + trip - length[g]
        else:
            begin[g] = backward_start - length[g]
            begin[e] = begin[g] + length[g] - trip
        forward_end, backward_start = begin[e] + length[e], begin[g]
    origin = min(begin.values())
    return Schedule(stages, period, 1, {op: (time - origin,) for op, time in begin.items()})


def trip_span(costs: CostModel, behind: int, transfers: int, period: int) -> int:
    """V of a cut: from the start of SEND_F to the end of SEND_B.

    Args:
        costs: the machines.
        behind: V of the stage behind it.
        transfers: ns of both.
        period: ns.
    """
    if costs.cluster.links.duplex == "full":
        return behind + transfers
    return extend_one_span(behind, transfers, period)
