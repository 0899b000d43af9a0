"""Units on their way to the host and back, in order of issue (docs/reference/remat-rules.md, T2).

A storage that has left is emptied, not released: whatever autograd saved keeps pointing at it and
finds the bytes again once they are back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from threading import Event
from typing import Any

import torch
from torch import Tensor

from pipeplan.host_copy import Copies, CopyEngine
from pipeplan.livebytes import resized
from pipeplan.pinned import PinnedPool


class OffloadedUnits:
    """What is away in one pass: one worker for both directions."""

    def __init__(self, device: torch.device, pinned: PinnedPool) -> None:
        self._way = CopyEngine(device, duplex=False, pinned=pinned)
        self._jobs: dict[int, list[Future[Any]]] = defaultdict(list)
        self._away: dict[int, tuple[Sequence[Tensor], Future[Copies]]] = {}
        self._unused: list[Event] = []
        self._dropped = False

    def offload(self, unit: int, parts: Sequence[Tensor], unused: Event | None) -> None:
        """Copy `parts`, one flat tensor per storage; emptied behind the copy and `unused`."""
        if unused is not None:
            self._unused.append(unused)

        def empty() -> None:
            if unused is not None:
                unused.wait()
                if self._dropped:
                    return
                self._way.settle()
            for part in parts:
                _resize(part, 0)

        copies = self._way.out(list(parts), empty)
        self._away[unit] = parts, copies
        self._jobs[unit].append(copies)

    def prefetch(self, unit: int) -> None:
        """Copy what was offloaded of `unit` back, into the same storages."""
        parts, copies = self._away.pop(unit)

        def refill() -> None:
            for part in parts:
                _resize(part, part.nbytes)

        self._jobs[unit].append(self._way.back(list(parts), copies.result, refill))

    def wait(self, unit: int) -> None:
        """Returns when the last transfer of `unit` has ended; raises what went wrong in one."""
        for job in self._jobs.pop(unit, []):
            job.result()
        self._way.join()

    def close(self) -> None:
        """Ends the worker, behind all that was issued."""
        self._way.close()

    def drop(self) -> None:
        """Lets the worker end where the pass does not: what is still in use is not emptied.

        It waits for nothing, so that any thread may call it.
        """
        self._dropped = True
        for unused in self._unused:
            unused.set()


def _resize(part: Tensor, size: int) -> None:
    part.untyped_storage().resize_(size)
    resized(part)
