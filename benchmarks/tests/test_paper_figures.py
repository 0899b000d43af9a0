"""Figures 11 to 16 of the paper: their instances, and what the kept rows must say."""

from __future__ import annotations

import json
from typing import Any

import pytest

from benchmarks import paper_figures
from benchmarks.paper_figure_pages import below, picture, points
from pipeplan.testing.instances import chain_of

ROWS: dict[str, Any] = json.loads(paper_figures.RESULT.read_text(encoding="utf-8"))
POINTS = {
    (key, share): point
    for key, row in ROWS.items()
    for share, point in zip(paper_figures.SHARES, points(row), strict=False)
}


def test_groups_are_those_of_section_7() -> None:
    """A residual block is one layer, and so is a dense layer; nothing is lost."""
    layers = {name: len(paper_figures.groups_of(name).layers) for name in paper_figures.NETWORKS}
    assert layers == {
        "resnet18": 10,
        "resnet34": 18,
        "resnet50": 18,
        "resnet101": 35,
        "densenet121": 63,
    }
    for name in layers:
        whole, grouped = chain_of(name), paper_figures.groups_of(name)
        for field in ("forward_ns", "backward_ns", "weight_bytes"):
            sums = [
                sum(getattr(layer, field) for layer in chain.layers) for chain in (whole, grouped)
            ]
            assert sums[0] == sums[1]


def test_every_figure_has_its_points() -> None:
    """Ten of at least five memories each, with all four sets."""
    cases = {(name, gpus) for name in paper_figures.NETWORKS for gpus in paper_figures.GPUS}
    assert {(name, int(gpus)) for name, gpus in map(str.split, ROWS)} == cases
    assert len(POINTS) >= 5 * len(cases)
    for key, row in ROWS.items():
        drawn = picture(key, row)
        assert drawn.cloud
        assert len(drawn.ours) == len(drawn.ilp) == len(drawn.bound) == len(points(row))


@pytest.mark.parametrize(("key", "share"), POINTS)
def test_nobody_is_below_ours(key: str, share: float) -> None:
    """Neither PipeDream nor the ILP."""
    assert below(POINTS[key, share]) == []


@pytest.mark.parametrize(("key", "share"), POINTS)
def test_proofs_agree(key: str, share: float) -> None:
    """The ILP's optimum is ours with k = 1; bounds are below plans; none must recompute."""
    point = POINTS[key, share]
    if point.status == "optimal":
        assert point.ilp == point.ours_k1
    assert point.bound is not None
    for period in (point.pipedream, point.ilp, point.ours_k1, point.ours, *point.alone):
        assert period is None or period >= point.bound
    if point.recompute is not None and point.exact is not None:
        assert point.recompute <= point.exact
