"""What compiled moves make of random numbers from 0 to 1."""

from __future__ import annotations

from pipeplan.ilp.compiled import compiled


@compiled
def pick(draw: float, count: int) -> int:
    """One of so many, from 0 on."""
    return min(int(draw * count), count - 1)
