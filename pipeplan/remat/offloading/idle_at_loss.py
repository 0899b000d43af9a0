"""Idle time at the loss, between forward and backward: (O9) of docs/reference/remat-rules.md.

Amounts and times share one unit: what the channel moves in a time is that time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[Any]
"""Integers, or floats where parts of units move."""


@dataclass(frozen=True)
class PhaseSide:
    """Operations of one phase seen from the turn: the nearest first.

    Attributes:
        apart: time between the turn and the operation, on the turn's side of it.
        room: what may be present of units that could be away, per operation.
    """

    apart: Numbers
    room: Numbers


def phases(time: Numbers, room: Numbers, turn: int) -> tuple[PhaseSide, PhaseSide]:
    """Both phases seen from the turn, given `time` and `room` of all operations."""
    ahead, behind = time[:turn][::-1], time[turn:]
    return (
        PhaseSide(np.cumsum(ahead) - ahead, room[:turn][::-1]),
        PhaseSide(np.cumsum(behind) - behind, room[turn:]),
    )


def idle_at_loss(
    kept: Numbers, a: Numbers, b: Numbers, forward: PhaseSide, backward: PhaseSide
) -> Numbers:
    """Least idle time at the turn, one entry per state.

    Args:
        kept: amount that never leaves.
        a: amount still to offload when the last forward ends; below 0 the time since the last
            offload ended.
        b: the same for prefetches, seen backwards from the first backward.
        forward: the operations ahead of the turn.
        backward: those behind it.
    """
    found: Numbers = np.maximum(a + b, 0)
    # An offload that reaches into the backward phase, a prefetch that begins in the forward one.
    for pending, slack, side in ((a, -b, backward), (b, -a, forward)):
        apart, room = side.apart[None, :], side.room[None, :]
        lacking = (kept + np.maximum(pending, 0))[:, None] - room - apart
        meets = (pending[:, None] > 0) & (apart < slack[:, None])
        found = np.maximum(found, np.where(meets, lacking, 0).max(axis=1, initial=0))
    return found
