"""Diagrams of methods under budgets."""

from __future__ import annotations

from pipeplan.report.budget import Curves, _diagrams


def test_places_without_a_diagram_are_empty() -> None:
    """Three diagrams in two columns: the fourth place shows no axes."""
    curves = Curves("title", "x", "y", {"line": [(0.0, 1.0), (1.0, None)]})
    figure = _diagrams([curves] * 3, 2)
    assert [axes.axison for axes in figure.axes] == [True, True, True, False]
