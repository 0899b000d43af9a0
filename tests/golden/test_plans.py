"""A change that only renames or moves leaves the solver's plans as they are."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.golden import plans

KNOWN = json.loads(plans.FILE.read_text())


@pytest.mark.skipif(
    KNOWN["made_with"] != plans.libraries(), reason="digests of other releases of the libraries"
)
@pytest.mark.parametrize(("name", "make"), list(plans.cases()), ids=[n for n, _ in plans.cases()])
def test_the_solver_finds_the_same_plan(name: str, make: Callable[[], plans.Question]) -> None:
    """Same chain, cluster, seed and work: the same stages, times, bytes and bounds."""
    assert plans.made(make) == KNOWN["plans"][name]


def test_the_file_lists_every_case() -> None:
    """Neither more nor fewer."""
    assert [name for name, _ in plans.cases()] == list(KNOWN["plans"])
    assert len(KNOWN["plans"]) >= 40
