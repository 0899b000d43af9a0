"""Periodic checkpointing: equal runs of layers, each kept by its input, the last one kept whole.

T. Chen, B. Xu, C. Zhang, C. Guestrin, *Training deep nets with sublinear memory cost* (2016), as
`torch.utils.checkpoint.checkpoint_sequential` does it; a comparator.
"""

from __future__ import annotations

from pipeplan.remat.schedules.costs import Costs
from pipeplan.remat.schedules.replay import judge
from pipeplan.remat.schedules.schedule import DeviceOp, DeviceOpKind, DeviceSchedule


def periodic(costs: Costs, segments: int) -> DeviceSchedule:
    """`segments` runs of L // segments layers, the last one with the rest; 1 keeps everything."""
    size = costs.layers // segments
    starts = [index * size for index in range(segments)]
    ends = [*starts[1:], costs.layers]
    ops: list[DeviceOp] = []
    for start, end in zip(starts[:-1], ends, strict=False):
        ops.append(DeviceOp(DeviceOpKind.KEEP_INPUT, start))
        ops += [DeviceOp(DeviceOpKind.KEEP_NOTHING, layer) for layer in range(start + 1, end)]
    for start, end in zip(reversed(starts), reversed(ends), strict=True):
        ops += [DeviceOp(DeviceOpKind.KEEP_ALL, layer) for layer in range(start, end)]
        ops.append(DeviceOp(DeviceOpKind.FREE, end))
        ops += [DeviceOp(DeviceOpKind.BACKWARD, layer) for layer in range(end - 1, start - 1, -1)]
    return DeviceSchedule(costs.layers, tuple(ops))


def keep_all(costs: Costs) -> DeviceSchedule:
    """Every layer forward once for its backward: what a framework does by itself."""
    return periodic(costs, 1)


def periodic_within(costs: Costs, budget: int) -> DeviceSchedule:
    """The fastest number of segments that keeps `budget`; of least memory where none does."""
    outcomes = [
        (judge(costs, schedule), schedule)
        for schedule in (periodic(costs, count) for count in range(1, costs.layers + 1))
    ]
    fitting = [pair for pair in outcomes if pair[0].peak_bytes <= budget]
    if fitting:
        return min(fitting, key=lambda pair: pair[0].makespan_ns)[1]
    return min(outcomes, key=lambda pair: pair[0].peak_bytes)[1]
