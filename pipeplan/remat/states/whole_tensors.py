"""Whole tensors in place of parts of groups (X. Zhao's thesis, section 4.6, Algorithm 8).

At each step at least as many bytes as the program asks for leave and are given up, and at most as
many come: so the whole tensors take no more of the device than the parts did.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

TOLERANCE: Final = 1e-6
"""Parts of a group that a solver's answer may be off by."""


@dataclass
class TensorMoves:
    """What one group's tensors do, by position since g_w; tensors by index in the group.

    Attributes:
        copies: tensors whose copy to the host runs during a position.
        frees: tensors that are given up on the device as a position begins.
        fetches: tensors that come back during a position.
    """

    copies: dict[int, list[int]] = field(default_factory=dict)
    frees: dict[int, list[int]] = field(default_factory=dict)
    fetches: dict[int, list[int]] = field(default_factory=dict)


def largest_within(sizes: Mapping[int, int], capacity: int) -> set[int]:
    """Keys whose sizes add up to as much as `capacity` allows: a knapsack."""
    if capacity < 0:
        return set()
    if sum(sizes.values()) <= capacity:
        return set(sizes)
    from ortools.algorithms.python import knapsack_solver

    kind = knapsack_solver.SolverType.KNAPSACK_MULTIDIMENSION_BRANCH_AND_BOUND_SOLVER
    solver = knapsack_solver.KnapsackSolver(kind, "select")
    keys = sorted(sizes)
    weights = [sizes[key] for key in keys]
    solver.init(weights, [weights], [capacity])
    solver.solve()
    return {key for place, key in enumerate(keys) if solver.best_solution_contains(place)}


def select(sizes: Mapping[int, int], least: int) -> set[int]:
    """SELECT of Algorithm 8: keys of as few bytes as are at least `least`."""
    return set(sizes) - largest_within(sizes, sum(sizes.values()) - least)


def whole(
    sizes: Sequence[int],
    stored: Sequence[float],
    offloaded: Sequence[float],
    current: Collection[int] = (),
) -> TensorMoves:
    """Algorithm 8 for parameters or optimizer states that the device updates.

    Args:
        sizes: bytes of tensors; all of them are on the device at position 0.
        stored: part that is on the device during each position.
        offloaded: part that leaves during each position.
        current: tensors of which the host has a copy anyway.
    """
    rounding = _Rounding(sizes, current)
    asked = 0.0
    for position, (part, leaving) in enumerate(zip(stored, offloaded, strict=True)):
        if position:
            rounding.keep(position, part)
        asked += leaving
        rounding.offload(position, asked)
    rounding.keep(len(stored), 1.0)
    return rounding.moves


def whole_of_host(
    sizes: Sequence[int],
    stored: Sequence[float],
    offloaded: Sequence[float],
    fetched: Sequence[float],
    window: int,
) -> TensorMoves:
    """The same for parameters that the host updates.

    In the window their gradients leave, and new values come of those that left before; behind it,
    values come and go as the parts do, and the host always has them. Copies are of gradients.

    Args:
        sizes: bytes of tensors.
        stored: part that is on the device during each position.
        offloaded: part that leaves during each position.
        fetched: part that comes during each position.
        window: positions behind g_w before the first use; two or more.
    """
    gradients = _Rounding(sizes, ())
    values = _Rounding(sizes, range(len(sizes)))
    values.alive.clear()
    asked = back = 0.0
    for position in range(window + 1):
        updated = set(gradients.current)
        asked += offloaded[position]
        gradients.offload(position, asked if position < window - 1 else 1.0)
        if position:
            back += fetched[position]
            values.fetch(position, back if position < window else 1.0, updated)
    for position in range(window + 2, len(stored)):
        values.keep(position, stored[position])
    values.keep(len(stored), 1.0)
    return TensorMoves(gradients.moves.copies, values.moves.frees, values.moves.fetches)


class _Rounding:
    """Which tensors are on the device, and which the host has, position by position."""

    def __init__(self, sizes: Sequence[int], current: Collection[int]) -> None:
        self.moves = TensorMoves()
        self.alive = set(range(len(sizes)))
        self._sizes = sizes
        self._total = sum(sizes)
        self.current = set(current)

    def _of(self, tensors: Collection[int]) -> dict[int, int]:
        return {each: self._sizes[each] for each in tensors}

    def _bytes(self, tensors: Collection[int]) -> int:
        return sum(self._sizes[each] for each in tensors)

    def _at_least(self, part: float) -> int:
        """Bytes of a part, rounded up behind the tolerance."""
        return -int(-(part - TOLERANCE) * self._total // 1)

    def _at_most(self, part: float) -> int:
        return int((part + TOLERANCE) * self._total)

    def offload(self, position: int, part: float) -> None:
        """At least `part` of all has a copy on the host once `position` has ended."""
        lacking = self._at_least(part) - self._bytes(self.current)
        if lacking > 0:
            left = set(range(len(self._sizes))) - self.current
            chosen = select(self._of(left), lacking)
            self.moves.copies[position] = sorted(chosen)
            self.current |= chosen

    def keep(self, position: int, part: float) -> None:
        """At most `part` of all is there during `position`; as much of it as is possible."""
        surplus = self._bytes(self.alive) - self._at_most(part)
        if surplus > 0:
            chosen = select(self._of(self.current & self.alive), surplus)
            self.moves.frees[position] = sorted(chosen)
            self.alive -= chosen
        else:
            self.fetch(position - 1, part)

    def fetch(self, position: int, part: float, of: Collection[int] | None = None) -> None:
        """What comes during `position` adds up to at most `part` of all with what is there."""
        missing = (set(range(len(self._sizes))) if of is None else set(of)) - self.alive
        chosen = largest_within(self._of(missing), self._at_most(part) - self._bytes(self.alive))
        if chosen:
            self.moves.fetches[position] = sorted(chosen)
            self.alive |= chosen
