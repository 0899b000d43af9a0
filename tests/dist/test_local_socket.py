"""Real processes that find out which of them share a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import case_scripts


@pytest.mark.skipif(
    not Path("/proc/sys/kernel/random/boot_id").exists(), reason="lines need Linux"
)
def test_lines_where_both_ends_have_them() -> None:
    """Both ends agree whatever one of them finds; trainings are bit-equal over either road.

    Without a line everything goes over gloo; a killed peer is missed at once, by number.
    What a rank sent arrives although it ends after that.
    """
    found = case_scripts.printed(Path(__file__).with_name("socket_cases.py"))
    assert found == [
        "together: exact, lines 01 02 03 12 13 23",
        "two_machines: exact, lines 01 23",
        "unreachable: exact, lines 01 02 03 23",
        "deaf: exact, lines 01 02 03 23",
        "one_off: exact, lines 01 03 13",
        "all_off: exact, lines none",
        "refused: exact, lines 02",
        "at once, lost [1]: connection closed by the other end",
        "evaluated 200",
    ]
