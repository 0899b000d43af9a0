"""Real processes that exchange messages over one group per directed boundary."""

from __future__ import annotations

from pathlib import Path

from tests import case_scripts


def test_messages_without_tags() -> None:
    """Four ranks, looped and straight, both modes: bit-equal though no message has a tag."""
    lines = case_scripts.printed(Path(__file__).with_name("channel_cases.py"))
    assert lines == [
        f"{semantics} {stages}: exact" for stages in (6, 4) for semantics in ("flush", "2bw")
    ]
