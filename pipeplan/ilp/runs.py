"""What a plan does again: runs of layers, and layers under one of their options."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pipeplan.plan import LayerRanges, inside, outermost

Segment = tuple[int, int]
"""First and last layer, 0-based, inclusive."""


class Run(NamedTuple):
    """Layers first..last, computed again as a whole, or one layer under one of its options."""

    first: int
    last: int
    option: int | None = None
    """Index into the layer's options (V5); None: all is computed again, (V1)-(V4)."""
    inner: tuple[Run, ...] = ()
    """Runs in it that end before it, which keep only their input when it is computed again."""

    @property
    def segment(self) -> Segment:
        """First and last layer."""
        return self.first, self.last

    def clip(self, first: int, last: int) -> Run:
        """The part of it in first..last, with the parts of what is in it."""
        span = max(first, self.first), min(last, self.last)
        parts = (each.clip(*span) for each in self.inner)
        inner = tuple(each for each in parts if each.first <= each.last)
        if inner and inner[-1].last == span[1]:
            inner = (*inner[:-1], *inner[-1].inner)
        return Run(*span, self.option, inner)


Runs = tuple[Run, ...]
"""Disjoint, in the chain's order."""


def listed(runs: Iterable[Run]) -> tuple[Segment, ...]:
    """Runs of layers as plans have them: each before those in it."""
    return tuple(each for run in runs for each in (run.segment, *listed(run.inner)))


def from_plan(runs: LayerRanges) -> Runs:
    """What `listed` has written."""
    return tuple(Run(*run, inner=from_plan(inside(runs, run))) for run in outermost(runs))
