"""Plans in the stock runtime of torch.distributed.pipelining, on processes that use gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import case_scripts

SCRIPT = Path(__file__).with_name("torch_schedule_cases.py")


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_exported_plans_train_as_plain_backwards(ranks: int) -> None:
    """Periodic and step plans, looped, V-shaped and in no order: gradients are bit-equal."""
    lines = case_scripts.printed(SCRIPT, str(ranks))
    assert len(lines) >= 2
    assert all(line.endswith(": exact") for line in lines), lines
    assert any("split backwards" in line for line in lines)
