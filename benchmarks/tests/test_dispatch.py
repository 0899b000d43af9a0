"""The executor itself costs little per action."""

from __future__ import annotations

import pytest

from benchmarks import dispatch


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 4])
def test_an_action_costs_at_most_50_us(ranks: int) -> None:
    """CPU time per action with in-process messages; the best of three, for a busy machine."""
    assert min(dispatch.measure(ranks) for _ in range(3)) <= 50
