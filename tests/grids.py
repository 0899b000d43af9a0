"""Parameters of a test from all values of several axes: a few together always, all when long.

A defect that one value makes alone shows in any combination with it. So where two axes have
nothing to do with each other, their whole product protects no more than each value once; the rest
of the product is marked `long`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

Axis = Sequence[Any] | Mapping[str, Any]
"""Values, or names of values -> values."""


def each_value(**axes: Axis) -> pytest.MarkDecorator:
    """Each value of each axis at least once; the other combinations are long."""
    return _parametrized(axes, 1)


def each_pair(**axes: Axis) -> pytest.MarkDecorator:
    """Each two values of two axes at least once together; the other combinations are long."""
    return _parametrized(axes, 2)


def first(count: int, **axis: Sequence[Any]) -> pytest.MarkDecorator:
    """The first values of one axis; the others are long, such as more of the same random cases."""
    ((name, values),) = axis.items()
    params = [
        pytest.param(value, marks=() if place < count else (pytest.mark.long,))
        for place, value in enumerate(values)
    ]
    return pytest.mark.parametrize(name, params)


def _parametrized(axes: Mapping[str, Axis], together: int) -> pytest.MarkDecorator:
    rows = [_named(axis) for axis in axes.values()]
    short = chosen([len(row) for row in rows], together)
    params = []
    for places in itertools.product(*(range(len(row)) for row in rows)):
        cells = [row[place] for row, place in zip(rows, places, strict=True)]
        marks = () if places in short else (pytest.mark.long,)
        values = [value for _, value in cells]
        params.append(pytest.param(*values, id="-".join(name for name, _ in cells), marks=marks))
    return pytest.mark.parametrize(tuple(axes), params)


def _named(axis: Axis) -> list[tuple[str, Any]]:
    if isinstance(axis, Mapping):
        return list(axis.items())
    return [(_name(value, place), value) for place, value in enumerate(axis)]


def _name(value: object, place: int) -> str:
    if isinstance(value, (str, int, float)):
        return str(value)
    if isinstance(value, tuple) and all(isinstance(each, (str, int)) for each in value):
        return ",".join(map(str, value))
    return f"{place}"


def chosen(sizes: Sequence[int], together: int) -> set[tuple[int, ...]]:
    """Places on the axes such that each `together` values of different axes meet at least once.

    One: all axes are walked at once, a short one again and again, each time begun one further on.
    More: greedy, the combination with most that has not met yet, the first of those in order.
    """
    if together == 1:
        rounds = range(max(sizes))
        return {tuple((at + at // size) % size for size in sizes) for at in rounds}
    axes = list(itertools.combinations(range(len(sizes)), min(together, len(sizes))))

    def meets(places: tuple[int, ...]) -> set[tuple[tuple[int, int], ...]]:
        return {tuple((axis, places[axis]) for axis in some) for some in axes}

    product = list(itertools.product(*map(range, sizes)))
    missing = set().union(*map(meets, product)) if product else set()
    found: set[tuple[int, ...]] = set()
    while missing:
        best = max(product, key=lambda places: len(meets(places) & missing))
        found.add(best)
        missing -= meets(best)
    return found
