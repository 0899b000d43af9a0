"""Steps of assignment annealing, as machine code: `assignment_annealing` says them in words."""

from __future__ import annotations

from math import exp
from typing import Final, NamedTuple

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


class Units(NamedTuple):
    """What annealing knows of units, cuts and links; it changes none of it.

    Attributes:
        work, size: By unit, way to run and GPU: shares of a period, and of the GPU's memory.
        prices: By unit and way: what running so costs.
        ways: By unit: how many there are.
        pinned: By unit: whether it stays where it is.
        first, boundaries, beyond: By unit and one more: where its row of neighbours begins in the
            others; the boundary to a neighbour, and the unit beyond it.
        cuts: By boundary: price of a cut.
        busy: By boundary and class of links: share of a period; without rows where links are not
            watched.
        classes: By GPU and GPU.
    """

    work: Floats
    size: Floats
    prices: Floats
    ways: Ints
    pinned: Bools
    first: Ints
    boundaries: Ints
    beyond: Ints
    cuts: Floats
    busy: Floats
    classes: Ints


class Assignment(NamedTuple):
    """What annealing changes: GPU and way of each unit; shares of each GPU's time and memory, and
    of each link's time, by the GPUs at its ends.
    """

    homes: Ints
    chosen: Ints
    loads: Floats
    bytes: Floats
    links: Floats


@compiled
def _over(share: float) -> float:
    """What exceeds the whole, but for the rounding of sums."""
    return share - 1 if share > 1 + ROUNDING else 0.0


@compiled
def add_up(units: Units, at: Assignment) -> float:
    """Loads, bytes and links from nothing; the total."""
    total = 0.0
    for unit in range(len(at.homes)):
        gpu, way = at.homes[unit], at.chosen[unit]
        at.loads[gpu] += units.work[unit, way, gpu]
        at.bytes[gpu] += units.size[unit, way, gpu]
        total += units.prices[unit, way]
    for gpu in range(len(at.loads)):
        total += _over(at.loads[gpu]) + _over(at.bytes[gpu])
    for unit in range(len(at.homes)):
        for row in range(units.first[unit], units.first[unit + 1]):
            other = units.beyond[row]
            if unit < other and at.homes[unit] != at.homes[other]:
                boundary = units.boundaries[row]
                total += _cross(units, at, boundary, at.homes[unit], at.homes[other], 1)
    return total


@compiled
def anneal(
    units: Units, at: Assignment, draws: Floats, done: int, steps: int, total: float
) -> float:
    """Some of the steps, with these random numbers; the total behind them."""
    count, gpus = len(at.homes), len(at.loads)
    flips = FLIPS if units.work.shape[1] > 1 else 0.0
    for step in range(len(draws)):
        draw = draws[step]
        heat = INITIAL_TEMPERATURE * (1 - (done + step) / steps) + 1e-9
        unit = int(draw[0] * count)
        if draw[1] < flips:
            before, ways = at.chosen[unit], units.ways[unit]
            if ways == 1:
                continue
            way = (before + 1 + int(draw[2] * (ways - 1))) % ways
            worse = _run(units, at, unit, way)
            if worse > 0 and draw[3] >= exp(-worse / heat):
                _run(units, at, unit, before)
            else:
                total += worse
            continue
        # What decided on flips is as even among the numbers that are left.
        draw[1] = (draw[1] - flips) / (1 - flips)
        here, near = at.homes[unit], units.first[unit + 1] - units.first[unit]
        there = int(draw[2] * gpus)
        if draw[1] < NEAR and near > 0:
            there = at.homes[units.beyond[units.first[unit] + int(draw[2] * near)]]
        if there == here or units.pinned[unit]:
            continue
        worse = _move(units, at, unit, there)
        back = int(draw[4] / SWAP * count) if draw[4] < SWAP else unit
        swapped = back != unit and at.homes[back] == there and not units.pinned[back]
        if swapped:
            worse += _move(units, at, back, here)
        if worse > 0 and draw[3] >= exp(-worse / heat):
            _move(units, at, unit, here)
            if swapped:
                _move(units, at, back, there)
        else:
            total += worse
    return total


@compiled
def _run(units: Units, at: Assignment, unit: int, way: int) -> float:
    """Run a unit in another way; what that adds to the total."""
    gpu, before = at.homes[unit], at.chosen[unit]
    at.chosen[unit] = way
    load, size = at.loads[gpu], at.bytes[gpu]
    at.loads[gpu] += units.work[unit, way, gpu] - units.work[unit, before, gpu]
    at.bytes[gpu] += units.size[unit, way, gpu] - units.size[unit, before, gpu]
    more = _over(at.loads[gpu]) - _over(load) + _over(at.bytes[gpu]) - _over(size)
    return float(more + units.prices[unit, way] - units.prices[unit, before])


@compiled
def _move(units: Units, at: Assignment, unit: int, there: int) -> float:
    """Move a unit; what that adds to the total."""
    here, way = at.homes[unit], at.chosen[unit]
    more = 0.0
    for gpu in (here, there):
        more -= _over(at.loads[gpu]) + _over(at.bytes[gpu])
    at.loads[here] -= units.work[unit, way, here]
    at.bytes[here] -= units.size[unit, way, here]
    at.loads[there] += units.work[unit, way, there]
    at.bytes[there] += units.size[unit, way, there]
    for gpu in (here, there):
        more += _over(at.loads[gpu]) + _over(at.bytes[gpu])
    for row in range(units.first[unit], units.first[unit + 1]):
        boundary, home = units.boundaries[row], at.homes[units.beyond[row]]
        if home != here:
            more += _cross(units, at, boundary, here, home, -1)
        if home != there:
            more += _cross(units, at, boundary, there, home, 1)
    at.homes[unit] = there
    return more


@compiled
def _cross(units: Units, at: Assignment, boundary: int, one: int, other: int, sign: int) -> float:
    """Count a cut between two GPUs (sign 1), or no longer (-1); what that adds to the total."""
    more = sign * units.cuts[boundary]
    if len(units.busy) == 0:
        return float(more)
    low, high = min(one, other), max(one, other)
    before = at.links[low, high]
    at.links[low, high] += sign * units.busy[boundary, units.classes[low, high]]
    return float(more + _over(at.links[low, high]) - _over(before))
