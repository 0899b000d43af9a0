"""Lowering: from the plan's planned times to what each rank does, in which order, and why it ends.

`lower` makes the pattern of a plan (docs/reference/model.md §3); `check_deadlock` and `wait_cycle`
judge any program, a hand-written one included; `buffer_slots` sizes the message buffers of a
pattern.
"""

from pipeplan.lowering.buffers import buffer_slots
from pipeplan.lowering.deadlock import check_deadlock, wait_cycle
from pipeplan.lowering.rank_actions import lower

__all__ = ["buffer_slots", "check_deadlock", "lower", "wait_cycle"]
