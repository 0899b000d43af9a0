"""Copies between device and host, and the host's updates, beside the device's own work.

Each of the three lanes is a thread that works in order of issue. What they wait for was issued
before, so they cannot wait for each other. Bytes of the device change where the program says so,
never in a thread: a storage that comes back takes its bytes as its copy is issued, one that leaves
gives them up as its copy is waited for. These are the latest and the earliest moments, so what is
alive is what the judge counts (B3).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor

from pipeplan.host_copy import thread_of_caller
from pipeplan.livebytes import resized
from pipeplan.offmate.host_room import HostRoom
from pipeplan.remat.schedules.host_link import Transfer, TransferQueue


class Moving:
    """Three lanes and what has been issued on them."""

    def __init__(self, room: HostRoom, *, duplex: bool) -> None:
        """No job yet.

        Args:
            room: on the host.
            duplex: whether the two ways are lanes of their own, or one.
        """
        self._room = room
        self._out, self._back, self._host = (
            thread_of_caller(name) for name in ("out", "back", "host")
        )
        if not duplex:
            self._back.shutdown()
            self._back = self._out
        self._queue = TransferQueue(duplex)
        self._jobs: dict[int, Future[None]] = {}
        """Of each storage: what was issued last."""
        self._behind: dict[Transfer, Callable[[], None]] = {}

    def out(
        self, storage: int, parts: Sequence[Tensor], behind: Callable[[], None] | None = None
    ) -> None:
        """Queues a copy to the host; `behind` runs where it is known to have ended."""
        self._issue(self._out, self._room.take, Transfer(storage, out=True), parts, behind)

    def back(
        self, storage: int, parts: Sequence[Tensor], behind: Callable[[], None] | None = None
    ) -> None:
        """Queues a copy into `parts`, which have their bytes already; `behind` as for `out`."""
        self._issue(self._back, self._room.give, Transfer(storage, out=False), parts, behind)

    def _issue(
        self,
        lane: ThreadPoolExecutor,
        copy: Callable[[int, Sequence[Tensor]], None],
        transfer: Transfer,
        parts: Sequence[Tensor],
        behind: Callable[[], None] | None,
    ) -> None:
        self._queue.issue(transfer)
        if behind is not None:
            self._behind[transfer] = behind
        before, held = self._jobs.get(transfer.unit), list(parts)

        def work() -> None:
            if before is not None:
                before.result()
            with torch.no_grad():
                copy(transfer.unit, held)
            held.clear()  # a thread lets go of its job only behind the moment it is waited for

        self._jobs[transfer.unit] = lane.submit(work)

    def update(self, storages: Collection[int], step: Callable[[], None]) -> None:
        """Queues an update behind the copies of `storages`, which it reads or writes."""
        before = [self._jobs[each] for each in storages if each in self._jobs]

        def work() -> None:
            for each in before:
                each.result()
            step()

        job = self._host.submit(work)
        self._jobs.update(dict.fromkeys(storages, job))

    def wait(self, storage: int) -> None:
        """Returns when the last copy of `storage` has ended, and what that says of others."""
        self._jobs[storage].result()
        for transfer in self._queue.end(storage):
            behind = self._behind.pop(transfer, None)
            if behind is not None:
                self._jobs[transfer.unit].result()
                behind()

    def check(self) -> None:
        """Raises what a job has raised."""
        for job in self._jobs.values():
            job.result()

    def close(self) -> None:
        """Ends the threads behind all that was issued, which may have failed."""
        wait(self._jobs.values())
        for lane in (self._out, self._back, self._host):
            lane.shutdown(cancel_futures=True)


def resize(part: Tensor, size: int) -> None:
    """Gives the storage behind a flat tensor `size` bytes."""
    part.untyped_storage().resize_(size)
    resized(part)
