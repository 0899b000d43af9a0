"""Units on their way to the host and back, in order of issue (docs/reference/remat-rules.md, T2).

A storage of a boundary that has left is emptied, not released: whoever has the boundary keeps
pointing at it and finds the bytes again once they are back. What else autograd saved lets go of
its storage, which lives on where others hold it (a table that a layer makes once and keeps).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import Event
from typing import Any

import torch
from torch import Tensor

from pipeplan.host_copy import Copies, CopyEngine, flat
from pipeplan.livebytes import resized
from pipeplan.pinned import PinnedPool
from pipeplan.runtime.stages.saved_tensors import FreedStorage, SavedStorage


@dataclass
class _Unit:
    """One unit that leaves, is away or comes back.

    Attributes:
        parts: the storages of its boundary.
        leaving: those that autograd saved besides, until they have left.
        devices: where these are.
        gone: the same, while they are away.
    """

    parts: Sequence[Tensor]
    leaving: Sequence[SavedStorage]
    devices: Sequence[torch.device] = field(init=False)
    gone: list[FreedStorage] = field(default_factory=list)

    def __post_init__(self) -> None:
        """All of it is there."""
        self.devices = [each.storage.device for each in self.leaving]

    def empty(self) -> None:
        """It has left."""
        for part in self.parts:
            _resize(part, 0)
        self.gone = [FreedStorage.of(each) for each in self.leaving]
        self.leaving = ()

    def refill(self, rooms: Sequence[Tensor]) -> list[Tensor | None]:
        """There is room for it again; what to copy into, None where others kept the storage.

        Args:
            rooms: tensors without bytes, for storages that have to be made.
        """
        for part in self.parts:
            _resize(part, part.nbytes)
        pairs = zip(self.gone, rooms, strict=True)
        return [*self.parts, *(each.come_back(partial(_resize, room)) for each, room in pairs)]


class OffloadedUnits:
    """What is away in one pass: one worker for both directions."""

    def __init__(self, device: torch.device, pinned: PinnedPool) -> None:
        self._way = CopyEngine(device, duplex=False, pinned=pinned)
        self._jobs: dict[int, list[Future[Any]]] = defaultdict(list)
        self._away: dict[int, tuple[_Unit, Future[Copies]]] = {}
        self._unused: list[Event] = []
        self._dropped = False

    def offload(
        self,
        unit: int,
        parts: Sequence[Tensor],
        saved: Sequence[SavedStorage],
        unused: Event | None,
    ) -> None:
        """Copies a unit; it is given up behind the copy and `unused`.

        Args:
            unit: its number.
            parts: one flat tensor per storage of its boundary.
            saved: what autograd saved besides.
            unused: set where no operation uses it any more.
        """
        leaving = _Unit(parts, saved)
        if unused is not None:
            self._unused.append(unused)

        def empty() -> None:
            if unused is not None:
                unused.wait()
                if self._dropped:
                    return
                self._way.settle()
            leaving.empty()

        copies = self._way.out([*parts, *(flat(each.storage) for each in saved)], empty)
        self._away[unit] = leaving, copies
        self._jobs[unit].append(copies)

    def prefetch(self, unit: int) -> None:
        """Copies what was given up of `unit` back."""
        gone, copies = self._away.pop(unit)
        # Made in the caller's thread: where its live bytes are counted, they are, too.
        rooms = [torch.empty(0, dtype=torch.uint8, device=each) for each in gone.devices]
        parts: list[Tensor] = []
        chosen: Copies = []

        def refill() -> None:
            for part, copy in zip(gone.refill(rooms), copies.result(), strict=True):
                if part is not None:
                    parts.append(part)
                    chosen.append(copy)

        self._jobs[unit].append(self._way.back(parts, lambda: chosen, refill))

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


def _resize(part: Tensor, size: int) -> Tensor:
    """The whole storage behind `part`, which has `size` bytes now."""
    storage = part.untyped_storage()
    storage.resize_(size)
    resized(part)
    return flat(storage)
