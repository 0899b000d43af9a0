"""What a plan does again: runs of layers, and layers under one of their options."""

from __future__ import annotations

from typing import NamedTuple

Segment = tuple[int, int]
"""First and last layer, 0-based, inclusive."""


class Run(NamedTuple):
    """Layers first..last, computed again as a whole, or one layer under one of its options."""

    first: int
    last: int
    option: int | None = None
    """Index into the layer's options (V5); None: all is computed again, (V1)-(V4)."""

    @property
    def segment(self) -> Segment:
        """First and last layer."""
        return self.first, self.last


Runs = tuple[Run, ...]
"""Disjoint, in the chain's order."""
