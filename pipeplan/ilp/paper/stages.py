"""A decision with exact times as the solver's schedule: runs of layers become stages."""

from __future__ import annotations

from collections.abc import Mapping

from pipeplan.ilp.paper.decision import PaperDecision
from pipeplan.ilp.paper.instance import PaperInstance
from pipeplan.ilp.paper.times import Node
from pipeplan.ilp.schedule import OpId, Schedule
from pipeplan.plan import OpKind, Stage


def merged(
    instance: PaperInstance[int], decision: PaperDecision, period: int, times: Mapping[Node, int]
) -> Schedule:
    """The schedule at `times`, layers joined to one stage where both their passes touch.

    Joining changes no byte: nothing else of the GPU starts between back-to-back tasks.
    """
    runs = [[1, 1]]
    for layer in range(2, instance.layers + 1):
        if _touch(instance, decision, times, layer - 1):
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    starts: dict[OpId, tuple[int, ...]] = {}
    for stage, (first, last) in enumerate(runs):
        behind, before = last, instance.backward(first)
        starts[OpKind.F, stage] = (times[False, first],)
        starts[OpKind.B, stage] = (times[False, instance.backward(last)],)
        if (True, behind) in times:
            starts[OpKind.SEND_F, stage] = (times[True, behind],)
        if (True, before) in times:
            starts[OpKind.SEND_B, stage] = (times[True, before],)
    stages = tuple(
        Stage(id=index, layers=(first - 1, last - 1), gpu=decision.gpu[first])
        for index, (first, last) in enumerate(runs)
    )
    return Schedule(stages=stages, period=period, k=1, times=starts)


def _touch(
    instance: PaperInstance[int], decision: PaperDecision, times: Mapping[Node, int], layer: int
) -> bool:
    """Whether F and B of `layer` and of the next one run back to back on one GPU."""
    back = instance.backward(layer + 1)
    return decision.gpu[layer] == decision.gpu[layer + 1] and all(
        times[False, task] + instance.duration[task] == times[False, task + 1]
        for task in (layer, back)
    )
