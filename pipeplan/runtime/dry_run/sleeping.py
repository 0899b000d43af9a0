"""Ways to the host that take their planned time on the sleeping clock.

A rank's way to its host is its own: one clock per direction, or one for both under half duplex.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from pipeplan.plan import OpKind
from pipeplan.runtime.dry_run.clock import RankClock
from pipeplan.runtime.transport.base import Pending


class HostLinks(Protocol):
    """The way between a rank and its host, on which nothing really moves."""

    def start(self, kind: OpKind, stage: int, microbatch: int) -> Pending:
        """An OFFLOAD is issued or a PREFETCH posted; complete when the way has carried it."""


class EmulatedHostLinks:
    """Transfers take their time, one behind the other in the order in which they start."""

    def __init__(
        self, clock: RankClock, durations: Mapping[tuple[OpKind, int], int], *, duplex: bool
    ) -> None:
        """Takes what lasts how long.

        Args:
            clock: of this rank.
            durations: ns by kind and stage.
            duplex: whether the two directions have a clock each.
        """
        self._clock = clock
        self._durations = durations
        self._duplex = duplex
        self._free: dict[OpKind, int] = {}

    def start(self, kind: OpKind, stage: int, microbatch: int) -> Pending:
        """See `HostLinks`."""
        lane = kind if self._duplex else OpKind.OFFLOAD
        begin = max(self._clock.now(), self._free.get(lane, 0))
        self._free[lane] = begin + self._durations[kind, stage]
        return _Until(self._clock, self._free[lane])


class _Until:
    def __init__(self, clock: RankClock, end: int) -> None:
        self._clock, self._end = clock, end

    def wait(self) -> None:
        self._clock.until(self._end)
