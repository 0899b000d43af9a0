"""Real processes that exchange messages over one group per channel."""

from __future__ import annotations

from pathlib import Path

from tests import case_scripts


def test_messages_without_tags() -> None:
    """Looped, straight, tied across ranks, replicas, both modes: bit-equal without any tag."""
    lines = case_scripts.printed(Path(__file__).with_name("communicator_cases.py"))
    assert lines == [
        f"{semantics} {kind}: exact"
        for semantics in ("flush", "2bw")
        for kind in ("looped", "straight", "tied", "replicas", "four replicas")
    ]
