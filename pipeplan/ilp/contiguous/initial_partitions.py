"""Initial partitions of the kFkB search.

Two things bind: the longest load, and the period T' from which on every stage can hold the
ceil(V / T') micro-batches that flow through it at least. Where memory is scarce a partition of the
smallest max(longest load, T') is often a poor one: all its stages are full, and self-timed
execution has to wait at each. So for several longest loads L, and several T' from the smallest one
that L allows up to the best period, the partition of the smallest V in front is taken, for every
number of stages. Source: ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import numpy as np

from pipeplan.ilp.contiguous.dynamic_program import ContiguousDP
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.segment_tables import loads
from pipeplan.plan import Stage

PERIODS = 24
"""How many values of T each dynamic program is asked for a partition to start from."""
LONGEST = 8
"""How many longest loads are tried."""
ROOMS = 24
"""How many T' are tried for each of them."""
FINE = 64
"""The smallest T' is found up to this part of it."""


def initial_partitions(state: Incumbent) -> Iterator[tuple[Stage, ...] | None]:
    """Partitions that suit periods from the contiguous bound up to the best plan's.

    None says that a while has passed: with many kinds of GPUs each dynamic program may take a
    second.
    """
    costs, most = state.costs, state.most_in_flight
    relaxed, exact = (ContiguousDP(costs, most, any_k=any_k) for any_k in (True, False))
    low = max(1, int(state.bounds.get("contiguous", Fraction(1))))
    best = state.best
    high = max(low, int(best.per_microbatch) if best else relaxed.serial_ns)
    for solver in (relaxed, exact):
        for period in _points(low, high, PERIODS):
            partition = solver.solve(period)
            if partition is not None:
                yield partition.stages
            yield from _passed(solver)
    least = int(state.bounds.get("any", Fraction(1)))
    for longest in _longest_loads(relaxed, least, high):
        yield from _roomy(relaxed, longest, high)


def _passed(solver: ContiguousDP) -> Iterator[None]:
    """The sign that a while has passed, if one question is enough for that."""
    if solver.is_slow:
        yield None


def _roomy(solver: ContiguousDP, longest: int, high: int) -> Iterator[tuple[Stage, ...] | None]:
    """Partitions of loads up to `longest` whose bytes would do at less than the period `high`."""
    low, fits = 0, high + 1
    while fits - low > max(1, fits // FINE):
        middle = (low + fits) // 2 if fits <= high else high
        if solver.solve(middle, longest=longest) is not None:
            fits = middle
        elif middle == high:
            return
        else:
            low = middle
        yield from _passed(solver)
    for period in _points(fits, high, ROOMS):
        for partition in solver.each(period, longest):
            yield partition.stages
        yield from _passed(solver)
    yield None


def _longest_loads(solver: ContiguousDP, least: int, high: int) -> Iterator[int]:
    """Loads that a stage can have, from `least` to `high` ns: few, spread evenly among them."""
    costs = solver.costs
    every = np.unique([loads(costs, gpus[0]) for gpus in solver.classes])
    within = [int(load) for load in every if least <= load <= high]
    if within:
        for index in _points(0, len(within) - 1, LONGEST):
            yield within[index]


def _points(low: int, high: int, parts: int) -> Iterator[int]:
    """`low`, `high`, and what divides the way between them into `parts`, each once."""
    yield from dict.fromkeys(low + (high - low) * point // parts for point in range(parts + 1))
