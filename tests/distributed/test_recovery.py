"""What the documentation says after an error: model and `Pipeline` anew, and on it goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import case_scripts

CASES = (
    "flush: exact",
    "2bw: exact",
    "differing seeds: exact",
    "one leaves: exact",
    "in a group of the script's: exact",
    "and again: exact",
)


@pytest.mark.parametrize("sockets", ["on", "off"])
def test_a_new_pipeline_after_an_error(sockets: str) -> None:
    """All ranks hear of it and wait for nothing; a new one in the same processes trains bit-equal.

    Under torchrun's variables, where ranks were refused or one left, and in a process group that
    the script made itself, which stays as it was.
    """
    script = Path(__file__).with_name("recovery_cases.py")
    told = case_scripts.printed(script, sockets)
    assert told == [*(f"sockets {sockets}, {case}" for case in CASES), "the script's group: alive"]
