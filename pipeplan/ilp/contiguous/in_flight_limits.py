"""In-flight limits ("caps"): how many micro-batches a contiguous stage can hold."""

from __future__ import annotations

from pipeplan.ilp.costs import CostModel
from pipeplan.plan import Stage


def in_flight_limits(
    costs: CostModel, stages: tuple[Stage, ...], most: int | None
) -> tuple[int, ...] | None:
    """Per stage, how many micro-batches its GPU can hold; None if not one.

    A stage gets no more than two per stage of the pipeline, nor more than the one before it.
    """
    caps: list[int] = []
    for stage in stages:
        useful = min([2 * len(stages), *caps[-1:]])
        kept = max_in_flight(costs, stage, most)
        if kept == 0:
            return None
        caps.append(useful if kept is None else min(useful, kept))
    return tuple(caps)


def max_in_flight(costs: CostModel, stage: Stage, most: int | None) -> int | None:
    """How many micro-batches a stage alone on its GPU can hold, whatever the order of its ops.

    When it holds most it has begun the last of them, and its next op is a backward: there was
    room for all but one beside a forward, and for all beside a backward.

    Args:
        costs: Bytes, and what the GPU has.
        stage: The only one on its GPU.
        most: No stage may hold more (R6); None for no limit.

    Returns:
        The number, 0 if there is no room for one, None if there is no limit.
    """
    size = costs.segment(stage.first, stage.last)
    own = max(size.running, size.saved + size.backward)
    room = costs.budgets[stage.gpu] - size.states - own - _slots(costs, stage)
    if room < 0:
        return 0
    kept = 1 + room // size.saved if size.saved else None
    return most if kept is None else min(kept, most or kept)


def _slots(costs: CostModel, stage: Stage) -> int:
    """Bytes of the permanent buffers of both ends (P5); the exact model's messages come and go."""
    if costs.exact:
        return 0
    ends = [stage.first - 1, stage.last]
    inner = [layer for layer in ends if 0 <= layer < costs.layers - 1]
    return sum(2 * costs.tensor_bytes(layer, backward=False) for layer in inner)
