"""Whether a family of constraints of an integer program says what the others do not."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from pipeplan.remat.graph.milp.linear import Constraint, add


def excludes(make: Callable[[str], Any], family: str) -> bool:
    """Whether a family rules out a 0-1 assignment that all other families allow.

    Args:
        make: the program without a family that it names; the family is a method of it.
        family: the one in question.
    """
    assert make(family).solve("scip").objective is not None
    for index, row in reversed([*enumerate(getattr(make(family), family)())]):
        sides = [] if row.high == inf else [(row.high + 0.01, inf)]
        sides += [] if row.low == -inf else [(-inf, row.low - 0.01)]
        for low, high in sides:
            loose = make(family)
            expression = list(getattr(loose, family)())[index].expression
            if isinstance(expression, int):
                continue
            add(loose.model, Constraint(expression, low, high))
            if loose.solve("scip").objective is not None:
                return True
    return False
