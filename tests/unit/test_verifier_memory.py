"""Memory terms on chains worked out by hand."""

from __future__ import annotations

from pipeplan.plan import MemoryRow
from tests import handmade


def test_the_base_plan_by_hand() -> None:
    """The base plan's table, worked out on paper.

    GPU 0 keeps 2*100+100 + 2*50+50 = 450 of states. At 10 its peak: 2B starts, three micro-batches
    of stage 0 (7 each) and one of stage 2 (5) are saved: 26; 2B works with gy 1 + gx 4 = 5 more;
    0F's output of 3 waits for its transfer (10..15) and a gradient of 3 for 0B (55..80): 6.
    GPU 1 keeps 600. At 15 1F starts beside one more micro-batch (15..115 is longer than T): 2*9,
    works with x 3 + y 4 = 7; at 35 1B the same: 2*9, gy 4 + gx 3 = 7, and 1F's output of 4 waits
    until 41: 629.
    """
    first, second = handmade.base().memory
    assert first == MemoryRow(
        gpu=0,
        states_bytes=450,
        saved_bytes=26,
        working_bytes=5,
        direct_bytes=0,
        message_bytes=6,
        peak_bytes=487,
        budget_bytes=10_000,
    )
    assert (second.states_bytes, second.saved_bytes) == (600, 18)
    assert (second.working_bytes, second.message_bytes, second.peak_bytes) == (7, 4, 629)
