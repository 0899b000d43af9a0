"""Periodic checkpointing: equal runs of layers, each kept by its input, the last one kept whole.

What `torch.utils.checkpoint.checkpoint_sequential` does; a comparator.
"""

from __future__ import annotations

from pipeplan.remat.costs import Costs
from pipeplan.remat.judge import judge
from pipeplan.remat.schedule import Op, OpKind, Schedule


def periodic(costs: Costs, segments: int) -> Schedule:
    """`segments` runs of L // segments layers, the last one with the rest; 1 keeps everything."""
    size = costs.layers // segments
    starts = [index * size for index in range(segments)]
    ends = [*starts[1:], costs.layers]
    ops: list[Op] = []
    for start, end in zip(starts[:-1], ends, strict=False):
        ops.append(Op(OpKind.KEEP_INPUT, start))
        ops += [Op(OpKind.KEEP_NOTHING, layer) for layer in range(start + 1, end)]
    for start, end in zip(reversed(starts), reversed(ends), strict=True):
        ops += [Op(OpKind.KEEP_ALL, layer) for layer in range(start, end)]
        ops.append(Op(OpKind.FREE, end))
        ops += [Op(OpKind.BACKWARD, layer) for layer in range(end - 1, start - 1, -1)]
    return Schedule(costs.layers, tuple(ops))


def keep_all(costs: Costs) -> Schedule:
    """Every layer forward once for its backward: what a framework does by itself."""
    return periodic(costs, 1)


def periodic_within(costs: Costs, budget: int) -> Schedule:
    """The fastest number of segments that keeps `budget`; of least memory where none does."""
    outcomes = [
        (judge(costs, schedule), schedule)
        for schedule in (periodic(costs, count) for count in range(1, costs.layers + 1))
    ]
    fitting = [pair for pair in outcomes if pair[0].peak_bytes <= budget]
    if fitting:
        return min(fitting, key=lambda pair: pair[0].makespan_ns)[1]
    return min(outcomes, key=lambda pair: pair[0].peak_bytes)[1]
