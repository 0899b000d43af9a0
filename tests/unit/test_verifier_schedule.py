"""Times, resources and order, at the borders."""

from __future__ import annotations

from pipeplan.plan import Plan
from pipeplan.verifier import Rule, verify
from tests import handmade


def fifo_pair(second: int) -> Plan:
    """Two copies on one GPU, F and B of 1 ns, period 8; the second copy's F at `second`."""
    times = {"0F0": 0, "0B0": 6, "0F1": second, "0B1": 7}
    return handmade.plan(handmade.chain([(1, 1)]), [(0, 0, 0)], 8, times, k=2)


def test_fifo_between_copies() -> None:
    """Copy 1's F at 1 is in order; at 12 it comes after copy 0 of the next period, at 8."""
    assert verify(fifo_pair(1)) == ()
    late = fifo_pair(1)
    late = handmade.filled(handmade.moved(handmade.moved(late, "0F1", 12), "0B1", 13))
    (found,) = verify(late)
    assert found.rule is Rule.FIFO
    assert "0F1 -> 0F0 of the next period" in found.where
    assert "starts at 8 ns, need 13 ns" in found.message


def test_fifo_within_a_period() -> None:
    """Copy 1 before copy 0 is refused, with both times."""
    swapped = handmade.moved(handmade.moved(fifo_pair(1), "0F0", 2), "0B0", 6)
    lines = [str(v) for v in verify(handmade.filled(swapped))]
    assert len(lines) == 1
    assert lines[0].startswith("fifo, 0F0 -> 0F1 at 1 ns of the period:")
    assert "starts at 1 ns, need 3 ns" in lines[0]
