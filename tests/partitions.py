"""2-partition and 3-partition by enumeration: what the papers' reductions are held against."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

Parts = list[tuple[int, ...]]


def target(values: Sequence[int]) -> int:
    """V: what each triple must add up to.

    The papers ask for triples that add up to V and leave out that V/4 < u < V/2. Only that makes
    every set which adds up to V a triple, as their proofs need.
    """
    v, rest = divmod(3 * sum(values), len(values))
    assert rest == 0, "no instance of 3-partition"
    assert all(v < 4 * value and 2 * value < v for value in values), "outside the window"
    return v


def three_partition(values: Sequence[int]) -> Parts | None:
    """Triples of indices whose values add up to V each, or None where there are none."""
    return _triples(values, tuple(range(len(values))), target(values))


def _triples(values: Sequence[int], left: tuple[int, ...], v: int) -> Parts | None:
    if not left:
        return []
    for others in combinations(left[1:], 2):
        triple = (left[0], *others)
        if sum(values[i] for i in triple) == v:
            rest = _triples(values, tuple(i for i in left if i not in triple), v)
            if rest is not None:
                return [triple, *rest]
    return None


def two_partition(values: Sequence[int]) -> tuple[int, ...] | None:
    """Indices of values that add up to half of all, or None where there are none."""
    for count in range(len(values) + 1):
        for some in combinations(range(len(values)), count):
            if 2 * sum(values[i] for i in some) == sum(values):
                return some
    return None


def is_three_partition(values: Sequence[int], parts: Sequence[Sequence[int]]) -> bool:
    """Whether `parts` are triples of all indices, each once, that add up to V each."""
    v = target(values)
    used = sorted(i for part in parts for i in part)
    return used == list(range(len(values))) and all(
        len(part) == 3 and sum(values[i] for i in part) == v for part in parts
    )


YES = {
    "two triples of 15": (4, 4, 4, 5, 6, 7),
    "two triples of 13": (5, 4, 4, 4, 5, 4),
    "three triples of 15": (7, 4, 6, 5, 4, 5, 5, 4, 5),
}
"""Instances with a 3-partition."""
NO = {
    "five of 4 and a 6": (4, 4, 4, 4, 4, 6),
    "even numbers, odd target": (4, 6, 4, 6, 4, 6),
    "multiples of 3, target 20": (6, 9, 6, 6, 6, 6, 9, 6, 6),
}
"""Instances without one."""
