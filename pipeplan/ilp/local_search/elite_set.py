"""Allocations that almost fit at a period below the best plan's, kept for more annealing.

Most starts end far from a plan, a few within some percent of the memory, and these few are where a
plan is found. So annealing goes on from them: an elite set (Resende and Ribeiro 2003, GRASP).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from random import Random
from typing import Final

from pipeplan.ilp.local_search.allocation import Allocation

SIZE: Final = 6
"""Allocations that are kept."""
PATIENCE: Final = 2
"""How often annealing may go on from one in vain, before it is dropped."""


@dataclass(slots=True)
class Start:
    """Where annealing may begin: a new allocation, or where an earlier round was closest."""

    excess: float
    """How far it is from a plan, as annealing counts; infinite before the first round."""
    target: Fraction
    """Nanoseconds per micro-batch at which it is judged."""
    layout: Allocation
    failures: int = 0
    """How often annealing from it ended no closer to a plan, since it last did."""


class EliteSet:
    """The starts that ended closest to a plan."""

    def __init__(self) -> None:
        """Empty."""
        self._kept: list[Start] = []

    def add(self, start: Start) -> None:
        """Keep it if it is among the closest, and neither a plan nor tried too often."""
        if start.excess > 0 and start.failures < PATIENCE:
            self._kept.append(start)
            self._kept.sort(key=lambda one: one.excess)
            del self._kept[SIZE:]

    def take(self, random: Random, least: Fraction, best: Fraction) -> Start | None:
        """Remove any one whose period lies from `least` to below `best`; None: no such one."""
        self._kept = [one for one in self._kept if least <= one.target < best]
        if not self._kept:
            return None
        return self._kept.pop(random.randrange(len(self._kept)))
