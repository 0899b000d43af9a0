"""Ranks that nobody waits for by message are missed all the same."""

from __future__ import annotations

from pathlib import Path

from tests import case_scripts

SCRIPT = Path(__file__).with_name("monitor_cases.py")


def test_a_killed_rank_is_known_to_all() -> None:
    """Though main threads sleep: to its neighbour in the ring, and through it to the other one."""
    said = case_scripts.printed(SCRIPT, "kill", timeout_s=60)
    heard = [f"kill: rank {rank} hears: rank 2 of all is gone" for rank in (0, 1)]
    assert sorted(said) == [*heard, "over"]


def test_a_rank_that_fails_and_lives_on_is_known_to_all() -> None:
    """It says so itself."""
    said = case_scripts.printed(SCRIPT, "fail", timeout_s=60)
    heard = [f"fail: rank {rank} hears: rank 2 of all has failed" for rank in (0, 1, 2)]
    assert sorted(said) == [*heard, "over"]


def test_nobody_is_missed_who_leaves_with_the_others() -> None:
    """However long the run: the waits of the ring have no timeout."""
    assert case_scripts.printed(SCRIPT, "leave", timeout_s=60) == ["over"]
