"""A change that only renames or moves leaves the solver's plans as they are."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.golden import plans

KNOWN = json.loads(plans.FILE.read_text())
LONG = (
    "resnet152 8 0.8",
    "resnet50 4 0.3 recompute",
    "gpt24 8 0.4 offload",
    "resnet50 4 0.3 offload",
    "resnet18 2 1.2",
    "resnet18 4 0.6",
    "resnet34 4 1.2",
    "resnet34 4 0.6",
    "resnet34 4 0.5 recompute",
    "llama24 8 0.6",
    "llama24 8 0.5 recompute",
    "resnet18 3 0.6 contiguous flush",
)
"""Those that take longest; smaller networks are asked the same, and GPT-48 has as many layers."""
CASES = [
    pytest.param(name, make, id=name, marks=(pytest.mark.long,) if name in LONG else ())
    for name, make in plans.cases()
]


@pytest.mark.skipif(
    KNOWN["made_with"] != plans.libraries(), reason="digests of other releases of the libraries"
)
@pytest.mark.parametrize(("name", "make"), CASES)
def test_the_solver_finds_the_same_plan(name: str, make: Callable[[], plans.Question]) -> None:
    """Same chain, cluster, seed and work: the same stages, times, bytes and bounds."""
    assert plans.made(make) == KNOWN["plans"][name]


def test_the_file_lists_every_case() -> None:
    """Neither more nor fewer."""
    assert [name for name, _ in plans.cases()] == list(KNOWN["plans"])
    assert set(LONG) < set(KNOWN["plans"])
    assert len(KNOWN["plans"]) >= 40
