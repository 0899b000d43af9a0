"""Data parallel x pipeline from Python: 2 x 2 ranks equal one process that averages."""

from __future__ import annotations

import re
from pathlib import Path

from tests import case_scripts

EXPECTED = (
    "got 4 ranks, need 6, one per GPU of the plan and replica: 2 x 3",
    "backend: got nccl",
    "^replicas: exact$",
    "^resumed: exact$",
    "^in 16 bits: exact$",
    "^mesh: exact$",
    "^resumed on a mesh: exact$",
    r"mesh: got dimensions \('a', 'b'\), need \('dp', 'pp'\)",
    "mesh: got 4 ranks in dimension 'pp', need 2, one per GPU of the plan",
    "got 3 replicas and a mesh of 2",
    "^left behind: 0$",
)


def test_pipeline_with_replicas() -> None:
    """As torchrun starts ranks, then a mesh in another order; what does not fit leaves nothing."""
    lines = case_scripts.printed(Path(__file__).with_name("pipeline_cases.py"))
    assert len(lines) == len(EXPECTED), lines
    for line, expected in zip(lines, EXPECTED, strict=True):
        assert re.search(expected, line), line
