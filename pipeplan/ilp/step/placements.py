"""Where stages of a step may sit: contiguous, looped, V-shaped and wave placements, and their cuts.

A *placement* is the GPU of each stage in chain order. Looped placements come to the GPUs in the
same order each time (interleaved 1F1B: Narayanan et al. 2021), V-shaped ones turn around (Qi et
al. 2024), waves do so several times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final

from pipeplan.ilp.costs import CostModel
from pipeplan.plan import Stage

PASSES: Final = (1, 2, 3, 4)
"""How often the chain comes to each GPU."""


def placements(gpus: Sequence[int], layers: int) -> Iterator[tuple[int, ...]]:
    """Placements over `gpus`, each once, with one layer a stage at least."""
    seen = set()
    for passes in PASSES:
        for turns in (True, False):
            rows = [gpus[::-1] if turns and turn % 2 else gpus for turn in range(passes)]
            found = tuple(gpu for row in rows for gpu in row)
            if len(found) <= layers and found not in seen:
                seen.add(found)
                yield found


def even_cuts(costs: CostModel, placement: Sequence[int]) -> tuple[int, ...]:
    """First layer of each stage: work in proportion to speed, one layer a stage at least."""
    speeds = [costs.cluster.gpus[gpu].speed for gpu in placement]
    work = list(accumulate(x.forward_ns + x.backward_ns for x in costs.chain.layers))
    shares = list(accumulate(speeds))
    cuts = [0]
    for index in range(1, len(placement)):
        goal = work[-1] * shares[index - 1] / shares[-1]
        nearest = bisect_left(work, goal)
        if nearest and goal - work[nearest - 1] < work[nearest] - goal:
            nearest -= 1
        least, most = cuts[-1] + 1, costs.layers - (len(placement) - index)
        cuts.append(min(max(nearest + 1, least), most))
    return tuple(cuts)


def stages_of(
    costs: CostModel, cuts: Sequence[int], placement: Sequence[int], *, split: bool
) -> tuple[Stage, ...]:
    """The stages between cuts; with `split`, every backward that may be is two ops."""
    borders = pairwise([*cuts, costs.layers])
    return tuple(
        Stage(
            id=index,
            layers=(first, behind - 1),
            gpu=gpu,
            split_backward=split and costs.may_split(first, behind - 1),
        )
        for index, ((first, behind), gpu) in enumerate(zip(borders, placement, strict=True))
    )


def keeps_together(costs: CostModel, stages: Sequence[Stage]) -> bool:
    """Whether tied layers share a GPU and pinned layers sit on theirs."""
    home = [stage.gpu for stage in stages for _ in range(stage.first, stage.last + 1)]
    tied = all(len({home[layer] for layer in group}) == 1 for group in costs.tied_groups)
    return tied and costs.keeps_pins(stages)
