"""Real processes that find out which of them share a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import case_scripts


@pytest.mark.skipif(
    not Path("/proc/sys/kernel/random/boot_id").exists(), reason="socket channels need Linux"
)
def test_channels_where_both_ends_have_them() -> None:
    """Both ends agree whatever one of them finds; trainings are bit-equal over either road.

    Without a channel everything goes over gloo; a killed peer is missed at once, by number.
    What a rank sent arrives although it ends after that.
    """
    found = case_scripts.printed(Path(__file__).with_name("socket_cases.py"))
    assert found == [
        "together: exact, channels 01 02 03 12 13 23",
        "two_machines: exact, channels 01 23",
        "unreachable: exact, channels 01 02 03 23",
        "deaf: exact, channels 01 02 03 23",
        "one_nameless: exact, channels 01 03 13",
        "all_nameless: exact, channels none",
        "refused: exact, channels 02",
        "lost [1]: connection closed by the other end",
        "evaluated 200",
    ]
