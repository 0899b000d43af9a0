"""What of a product of parameters always runs."""

from __future__ import annotations

import itertools

import pytest

from tests import grids


@pytest.mark.parametrize("sizes", [[1], [3], [2, 5], [4, 3, 2], [2, 2, 2, 2]])
@pytest.mark.parametrize("together", [1, 2])
def test_all_values_meet(sizes: list[int], together: int) -> None:
    """Each value, or each two values of two axes, are in what is chosen."""
    found = grids.chosen(sizes, together)
    for axes in itertools.combinations(range(len(sizes)), min(together, len(sizes))):
        met = {tuple(places[axis] for axis in axes) for places in found}
        assert met == set(itertools.product(*(range(sizes[axis]) for axis in axes)))
    assert together > 1 or len(found) == max(sizes)


def test_the_rest_is_long() -> None:
    """Nothing of the product is lost."""
    mark = grids.each_value(name={"a": 1, "b": 2, "c": 3}, mode=["x", "y"]).mark
    names, params = mark.args
    assert names == ("name", "mode")
    assert {param.values for param in params} == set(itertools.product((1, 2, 3), "xy"))
    assert [param.id for param in params if not param.marks] == ["a-x", "b-y", "c-y"]
