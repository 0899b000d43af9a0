"""`pipeplan remat --curve`: time over budget of several methods, as far as Ctrl-C lets it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from pipeplan.cli import common

_Found = TypeVar("_Found")
Point = dict[str, int | None]
"""`budget_bytes`, and ns by method; None where a method has nothing that small."""
BUDGETS = 9
"""Of a curve whose number is not given."""


def by_method(
    methods: Sequence[str],
    limits: Callable[[], Sequence[int]],
    find: Callable[[str, Sequence[int]], _Found],
) -> tuple[Sequence[int], dict[str, _Found]]:
    """The budgets of a curve, bytes, and what each method finds at them.

    The plan is there by then: Ctrl-C only leaves out the methods that are not done.
    """
    budgets: Sequence[int] = ()
    found: dict[str, _Found] = {}
    try:
        budgets = limits()
        for method in methods:
            found[method] = find(method, budgets)
    except KeyboardInterrupt:
        left = ", ".join(each for each in methods if each not in found)
        common.say(f"interrupted: the curve lacks {left}")
    return budgets, found


def points(budgets: Sequence[int], times: dict[str, list[int | None]]) -> list[Point]:
    """One entry per budget; nothing where no method is done."""
    if not times:
        return []
    return [
        {"budget_bytes": budget, **{method: column[at] for method, column in times.items()}}
        for at, budget in enumerate(budgets)
    ]


def draw(title: str, found: list[Point], path: str | None) -> None:
    """The curve as a picture, where one is asked for and there is any."""
    if not path or not found:
        return
    from pipeplan.report.budget import curves_of, draw_curves

    draw_curves([curves_of(title, found)], path)
