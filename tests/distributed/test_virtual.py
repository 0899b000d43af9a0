"""Real processes and real messages on the virtual clock."""

from __future__ import annotations

from pathlib import Path

from tests import case_scripts


def test_gloo_ranks_keep_the_simulators_time() -> None:
    """2, 4, 8 and 16 processes over gloo: every action ends when the simulator says."""
    lines = case_scripts.printed(Path(__file__).with_name("virtual_cases.py"))
    assert lines == [f"{ranks} ranks: exact 2 of 2" for ranks in (2, 4, 8, 16)]
