"""Units of the assignment model: runs of layers that it treats as indivisible."""

from __future__ import annotations

from itertools import pairwise

from pipeplan.ilp.bounds.load import min_link_occupancy
from pipeplan.ilp.costs import CostModel

Segment = tuple[int, int]


def merge_layers(costs: CostModel, count: int, period: int) -> tuple[Segment, ...]:
    """At most about `count` runs of layers, none cut where that takes longer than `period`.

    Forced runs come first; then neighbours with the smallest joint load are merged, where a
    transfer that the merge saves counts for it. Layers whose given GPUs differ never merge.
    """
    cuts = min_link_occupancy(costs)
    items: list[Segment] = [(0, 0)]
    for layer in range(1, costs.layers):
        if cuts[layer - 1] > period and _may_join(costs, items[-1], (layer, layer)):
            items[-1] = (items[-1][0], layer)
        else:
            items.append((layer, layer))
    while len(items) > max(count, 1):
        joins = [n for n, pair in enumerate(pairwise(items)) if _may_join(costs, *pair)]
        if not joins:
            break
        best = min(joins, key=lambda n: _price(costs, items, cuts, n))
        items[best : best + 2] = [(items[best][0], items[best + 1][1])]
    return tuple(items)


def _may_join(costs: CostModel, one: Segment, other: Segment) -> bool:
    """Whether at most one GPU is given for the layers of two neighbours."""
    return len(set(costs.pinned_gpus[one[0] : other[1] + 1]) - {None}) <= 1


def _price(costs: CostModel, items: list[Segment], cuts: list[int], index: int) -> int:
    """What a merge of items `index` and `index` + 1 costs: lost freedom less saved transfer."""
    load = costs.load_ns(items[index][0], items[index + 1][1], 0)
    return load - cuts[items[index][1]]
