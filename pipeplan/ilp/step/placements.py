"""Where stages of a step may sit: contiguous, looped, V-shaped and wave placements; cuts.

A *placement* is the GPU of each stage in chain order. Looped placements come to the GPUs in the
same order each time (interleaved 1F1B: Narayanan et al. 2021), V-shaped ones turn around (Qi et
al. 2024), waves do so several times.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise, product
from typing import Final

from pipeplan.ilp.costs import CostModel
from pipeplan.plan import Stage

PASSES: Final = (1, 2, 3, 4)
"""How often the chain comes to each GPU."""
MOVES: Final = (-1, 1, -2, 2, -3, 3)
"""Layers by which borders move."""


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


def balanced_cuts(costs: CostModel, placement: Sequence[int]) -> tuple[int, ...]:
    """First layer of each stage: loads of GPUs as even as borders allow.

    Borders begin at equal work and then move, one or two at a time, until that helps no more.
    """
    cuts = [*_equal_work(costs, placement), costs.layers]
    best, improved = _uneven(costs, cuts, placement), True
    borders = range(1, len(placement))
    moves = [*product(borders, MOVES, [0], [0]), *product(borders, (-1, 1), borders, (-1, 1))]
    while improved:
        improved = False
        for one, by, other, along in moves:
            moved = list(cuts)
            moved[one] += by
            moved[other] += along
            if all(first < second for first, second in pairwise(moved)):
                uneven = _uneven(costs, moved, placement)
                if uneven < best:
                    cuts, best, improved = moved, uneven, True
    return tuple(cuts[:-1])


def _uneven(costs: CostModel, cuts: Sequence[int], placement: Sequence[int]) -> tuple[int, int]:
    """The largest load of a GPU in ns per micro-batch, then the sum of squares."""
    loads = [0] * costs.gpus
    for gpu, (first, behind) in zip(placement, pairwise(cuts), strict=True):
        loads[gpu] += costs.load_ns(first, behind - 1, gpu)
    return max(loads), sum(load**2 for load in loads)


def _equal_work(costs: CostModel, placement: Sequence[int]) -> list[int]:
    """Borders at which each stage has work in proportion to the speed of its GPU."""
    work = list(accumulate(x.forward_ns + x.backward_ns for x in costs.chain.layers))
    shares = list(accumulate(costs.cluster.gpus[gpu].speed for gpu in placement))
    cuts = [0]
    for index in range(1, len(placement)):
        border = bisect_left(work, work[-1] * shares[index - 1] / shares[-1]) + 1
        most = costs.layers - (len(placement) - index)
        cuts.append(min(max(border, cuts[-1] + 1), most))
    return cuts


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
