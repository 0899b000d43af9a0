"""Where stages of a step may sit: contiguous, looped, V-shaped and wave placements.

A *placement* is the GPU of each stage in chain order. Looped placements come to the GPUs in the
same order each time (interleaved 1F1B: Narayanan et al. 2021), V-shaped ones turn around (Qi et
al. 2024), waves do so several times.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final

from pipeplan.ilp.costs import CostModel
from pipeplan.plan import Stage

PASSES: Final = (1, 2, 3, 4)
"""How often the chain comes to each GPU."""


def placements(costs: CostModel) -> Iterator[tuple[int, ...]]:
    """Placements over all GPUs, or the fastest where layers are fewer; each once."""
    by_speed = sorted(range(costs.gpus), key=lambda gpu: -costs.cluster.gpus[gpu].speed)
    gpus, seen = sorted(by_speed[: costs.layers]), set()
    for passes in PASSES:
        for turns in (True, False):
            rows = [gpus[::-1] if turns and turn % 2 else gpus for turn in range(passes)]
            found = tuple(gpu for row in rows for gpu in row)
            if len(found) <= costs.layers and found not in seen:
                seen.add(found)
                yield found


def stages_of(
    costs: CostModel, cuts: Sequence[int], placement: Sequence[int], splits: Sequence[bool]
) -> tuple[Stage, ...]:
    """The stages between cuts; a backward that shall be and may be is two ops."""
    borders = pairwise([*cuts, costs.layers])
    return tuple(
        Stage(
            id=index,
            layers=(first, behind - 1),
            gpu=gpu,
            split_backward=split and costs.may_split(first, behind - 1),
        )
        for index, ((first, behind), gpu, split) in enumerate(
            zip(borders, placement, splits, strict=True)
        )
    )
