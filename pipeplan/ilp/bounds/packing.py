"""A lower bound from packing equal items: layers of few sizes, as transformers have them.

Layers (merged where a cut between them cannot fit into T) are items, GPUs are bins of capacity T.
Items of equal load are alike, so a bin is a pattern: how many it holds of each size. Where the
GPUs' bins cannot hold all, no plan reaches T, whatever its k: loads per micro-batch are integers,
so a plan below T + 1 would have loads of at most T. Pigeonhole (`load`) looks at the heaviest
items alone and misses, for instance, that a heavy head leaves one GPU less for all the rest.
Source: the pattern model of Gilmore and Gomory (1961) for cutting stock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from math import prod
from typing import Final

from ortools.sat.python import cp_model

from pipeplan.ilp.bounds.load import item_loads, min_link_occupancy
from pipeplan.ilp.cpsat.solve import configured, run
from pipeplan.ilp.incumbent import Incumbent

MOST_FILLINGS: Final = 20_000
"""Beyond so many ways to fill a bin, full or not, the items are too different for this bound."""
STEP_S: Final = 2.0
"""Time limit of one question."""


def raise_bound(state: Incumbent, seconds: float) -> None:
    """Raise the bound for all plans by bisection between it and the best plan."""
    speeds = {gpu.speed for gpu in state.costs.cluster.gpus}
    if state.best is None or len(speeds) > 1:
        return
    state.set_phase("packing bound")
    end = state.elapsed + min(seconds, state.remaining)
    low, high = int(state.bounds["any"]), int(-(-state.best.per_microbatch // 1))
    cuts = min_link_occupancy(state.costs)
    while low < high and not state.done and state.elapsed < end:
        middle = (low + high) // 2
        items = Counter(item_loads(state.costs, cuts, middle))
        room = middle - 2 * state.costs.cluster.action_overhead_ns
        if _cannot_pack(state, items, room, min(STEP_S, end - state.elapsed)):
            low = middle + 1
            state.raise_bound("any", Fraction(low), from_bytes=False)
        else:
            high = middle


def _cannot_pack(state: Incumbent, items: Counter[int], room: int, seconds: float) -> bool:
    """Whether it is proven that the GPUs, with `room` ns each, cannot hold all items."""
    sizes = sorted((size for size in items if size), reverse=True)
    if sizes and sizes[0] > room:
        return True
    if prod(1 + min(items[size], room // size) for size in sizes) > MOST_FILLINGS:
        return False
    patterns = list(fillings(sizes, [items[size] for size in sizes], room))
    model = cp_model.CpModel()
    gpus = state.costs.gpus
    used = [model.new_int_var(0, gpus, f"p{number}") for number in range(len(patterns))]
    model.add(sum(used) <= gpus)
    for index, size in enumerate(sizes):
        held = sum(pattern[index] * times for pattern, times in zip(patterns, used, strict=True))
        model.add(held >= items[size])
    solver = configured(state.options, seconds)
    return run(solver, model) == cp_model.INFEASIBLE


def fillings(sizes: list[int], counts: list[int], room: int) -> Iterator[tuple[int, ...]]:
    """All ways to fill a bin such that nothing more fits; sizes in falling order.

    Args:
        sizes: Distinct positive loads.
        counts: How many items there are of each.
        room: Capacity of the bin.
    """
    if not sizes:
        yield ()
        return
    most = min(counts[0], room // sizes[0])
    for here in range(most, -1, -1):
        left = room - here * sizes[0]
        for rest in fillings(sizes[1:], counts[1:], left):
            used = sum(size * times for size, times in zip(sizes[1:], rest, strict=True))
            if here == counts[0] or left - used < sizes[0]:
                yield (here, *rest)
