"""Coarse units: runs of layers that the guided search treats as indivisible."""

from __future__ import annotations

from pipeplan.ilp.bounds import cheapest_cuts
from pipeplan.ilp.costs import Costs

Item = tuple[int, int]


def coarsen(costs: Costs, count: int, period: int) -> tuple[Item, ...]:
    """At most about `count` runs of layers, none cut where that takes longer than `period`.

    Forced runs come first; then neighbours with the smallest joint load are merged, where a
    transfer that the merge saves counts for it.
    """
    cuts = cheapest_cuts(costs)
    items: list[Item] = [(0, 0)]
    for layer in range(1, costs.layers):
        if cuts[layer - 1] > period:
            items[-1] = (items[-1][0], layer)
        else:
            items.append((layer, layer))
    while len(items) > max(count, 1):
        best = min(range(len(items) - 1), key=lambda n: _price(costs, items, cuts, n))
        items[best : best + 2] = [(items[best][0], items[best + 1][1])]
    return tuple(items)


def _price(costs: Costs, items: list[Item], cuts: list[int], index: int) -> int:
    """What a merge of items `index` and `index` + 1 costs: lost freedom less saved transfer."""
    load = costs.load_ns(items[index][0], items[index + 1][1], 0)
    return load - cuts[items[index][1]]
