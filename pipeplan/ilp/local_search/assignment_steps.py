"""Steps of assignment annealing, as machine code: `assignment_annealing` says them in words.

Arguments are tuples of arrays, which have no names: what numba keeps of a function names the
classes of its arguments, and cannot be read where a class is gone.
"""

from __future__ import annotations

from math import exp
from typing import Final

from pipeplan.ilp.compiled import Bools, Floats, Ints, compiled

INITIAL_TEMPERATURE: Final = 0.02
"""Excess that a hot step accepts with probability 1/e."""
FLIPS: Final = 0.4
"""Share of the steps that decide anew how a unit runs, where that is open."""
SWAP: Final = 0.3
"""Share of the other steps that also take a unit back."""
NEAR: Final = 0.6
"""Share of them that move a unit to the GPU of a neighbour."""
DRAWS: Final = 5
"""Random numbers of a step."""
ROUNDING: Final = 1e-9
"""Of sums of shares."""


Ways = tuple[Floats, Floats, Floats, Ints]
"""How units may run: work and size by unit, way and GPU, as shares of a period and of the GPU's
memory; prices by unit and way; how many ways each unit has."""
Neighbours = tuple[Ints, Ints, Ints, Floats]
"""By unit and one more, where its row begins in the next two: the boundary to a neighbour, and the
unit beyond it; then prices of cuts, by boundary."""
Links = tuple[Floats, Ints]
"""Share of a period for which a cut keeps a link busy, by boundary and class of links, without
rows where links are not watched; classes, by the lower and the higher GPU."""
At = tuple[Ints, Ints, Floats, Floats, Floats]
"""What steps change: GPU and way of each unit; shares of each GPU's period and memory, and of each
link's period, by the GPUs at its ends."""


@compiled
def _over(share: float) -> float:
    """What exceeds the whole, but for the rounding of sums."""
    return share - 1 if share > 1 + ROUNDING else 0.0


@compiled
def add_up(ways: Ways, near: Neighbours, links: Links, at: At) -> float:
    """Loads, bytes and links from nothing; the total."""
    work, size, prices, _ = ways
    first, boundaries, beyond, _ = near
    homes, chosen, loads, held, _ = at
    total = 0.0
    for unit in range(len(homes)):
        gpu, way = homes[unit], chosen[unit]
        loads[gpu] += work[unit, way, gpu]
        held[gpu] += size[unit, way, gpu]
        total += prices[unit, way]
    for gpu in range(len(loads)):
        total += _over(loads[gpu]) + _over(held[gpu])
    for unit in range(len(homes)):
        for row in range(first[unit], first[unit + 1]):
            other = beyond[row]
            if unit < other and homes[unit] != homes[other]:
                total += _cross(near, links, at, boundaries[row], homes[unit], homes[other], 1)
    return total


@compiled
def anneal(
    ways: Ways,
    near: Neighbours,
    links: Links,
    pinned: Bools,
    at: At,
    draws: Floats,
    done: int,
    steps: int,
    total: float,
) -> float:
    """Some of the steps, from hot to cold.

    Args:
        ways: how units may run.
        near: which units are next to each other.
        links: what cuts keep busy.
        pinned: by unit, whether it stays where it is.
        at: the allocation; changed.
        draws: by step, `DRAWS` random numbers from 0 to 1; changed.
        done: steps before these.
        steps: in all.
        total: before them.

    Returns:
        The total behind them.
    """
    count, flips = len(at[0]), FLIPS if ways[0].shape[1] > 1 else 0.0
    for step in range(len(draws)):
        draw = draws[step]
        heat = INITIAL_TEMPERATURE * (1 - (done + step) / steps) + 1e-9
        unit = int(draw[0] * count)
        if draw[1] < flips:
            total += _flip(ways, at, unit, draw, heat)
        elif not pinned[unit]:
            # What decided on flips is as even among the numbers that are left.
            draw[1] = (draw[1] - flips) / (1 - flips)
            total += _walk(ways, near, links, pinned, at, unit, draw, heat)
    return total


@compiled
def _flip(ways: Ways, at: At, unit: int, draw: Floats, heat: float) -> float:
    """Run a unit in another way, unless that is too bad; what that adds to the total."""
    before, number = at[1][unit], ways[3][unit]
    if number == 1:
        return 0.0
    worse = _run(ways, at, unit, (before + 1 + int(draw[2] * (number - 1))) % number)
    if worse > 0 and draw[3] >= exp(-worse / heat):
        _run(ways, at, unit, before)
        return 0.0
    return worse


@compiled
def _walk(
    ways: Ways,
    near: Neighbours,
    links: Links,
    pinned: Bools,
    at: At,
    unit: int,
    draw: Floats,
    heat: float,
) -> float:
    """Move a unit, perhaps one back, unless that is too bad; what that adds to the total."""
    first, _, beyond, _ = near
    homes, _, loads, _, _ = at
    here, neighbours = homes[unit], first[unit + 1] - first[unit]
    there = int(draw[2] * len(loads))
    if draw[1] < NEAR and neighbours > 0:
        there = homes[beyond[first[unit] + int(draw[2] * neighbours)]]
    if there == here:
        return 0.0
    worse = _move(ways, near, links, at, unit, there)
    back = int(draw[4] / SWAP * len(homes)) if draw[4] < SWAP else unit
    swapped = back != unit and homes[back] == there and not pinned[back]
    if swapped:
        worse += _move(ways, near, links, at, back, here)
    if worse > 0 and draw[3] >= exp(-worse / heat):
        _move(ways, near, links, at, unit, here)
        if swapped:
            _move(ways, near, links, at, back, there)
        return 0.0
    return worse


@compiled
def _run(ways: Ways, at: At, unit: int, way: int) -> float:
    """Run a unit in another way; what that adds to the total."""
    work, size, prices, _ = ways
    homes, chosen, loads, held, _ = at
    gpu, before = homes[unit], chosen[unit]
    chosen[unit] = way
    more = prices[unit, way] - prices[unit, before] - _over(loads[gpu]) - _over(held[gpu])
    loads[gpu] += work[unit, way, gpu] - work[unit, before, gpu]
    held[gpu] += size[unit, way, gpu] - size[unit, before, gpu]
    return float(more + _over(loads[gpu]) + _over(held[gpu]))


@compiled
def _move(ways: Ways, near: Neighbours, links: Links, at: At, unit: int, there: int) -> float:
    """Move a unit; what that adds to the total."""
    work, size, _, _ = ways
    first, boundaries, beyond, _ = near
    homes, chosen, loads, held, _ = at
    here, way = homes[unit], chosen[unit]
    more = 0.0
    for gpu in (here, there):
        more -= _over(loads[gpu]) + _over(held[gpu])
    loads[here] -= work[unit, way, here]
    held[here] -= size[unit, way, here]
    loads[there] += work[unit, way, there]
    held[there] += size[unit, way, there]
    for gpu in (here, there):
        more += _over(loads[gpu]) + _over(held[gpu])
    for row in range(first[unit], first[unit + 1]):
        boundary, home = boundaries[row], homes[beyond[row]]
        if home != here:
            more += _cross(near, links, at, boundary, here, home, -1)
        if home != there:
            more += _cross(near, links, at, boundary, there, home, 1)
    homes[unit] = there
    return more


@compiled
def _cross(
    near: Neighbours, links: Links, at: At, boundary: int, one: int, other: int, sign: int
) -> float:
    """Count a cut between two GPUs (sign 1), or no longer (-1); what that adds to the total."""
    busy, classes = links
    more = sign * near[3][boundary]
    if len(busy) == 0:
        return float(more)
    low, high, used = min(one, other), max(one, other), at[4]
    before = used[low, high]
    used[low, high] += sign * busy[boundary, classes[low, high]]
    return float(more + _over(used[low, high]) - _over(before))
