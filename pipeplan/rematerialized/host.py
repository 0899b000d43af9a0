"""Storages on their way to the host and back: one worker, in order of issue (docs/remat.md, T2).

A storage that has left is emptied, not released: whatever autograd saved keeps pointing at it and
finds the bytes again once they are back. On CUDA the copies go through pinned memory on a stream
of their own; on a processor the worker's thread copies while the caller's computes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from threading import Event
from typing import Any

import torch
from torch import Tensor

from pipeplan.livebytes import resized


class Host:
    """The way between a device and its host, for one pass."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._main = torch.cuda.current_stream(device) if self._cuda else None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="pipeplan-host")
        self._jobs: dict[int, list[Future[None]]] = defaultdict(list)
        self._away: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def offload(self, unit: int, parts: Sequence[Tensor], unused: Event | None) -> None:
        """Copy `parts`, one flat tensor per storage; emptied behind the copy and `unused`."""
        mark = self._mark()
        self._jobs[unit].append(self._worker.submit(self._out, unit, parts, mark, unused))

    def prefetch(self, unit: int) -> None:
        """Copy what was offloaded of `unit` back, into the same storages."""
        self._jobs[unit].append(self._worker.submit(self._back, unit, self._mark()))

    def wait(self, unit: int) -> None:
        """Returns when the last transfer of `unit` has ended; raises what went wrong in one."""
        for job in self._jobs.pop(unit, []):
            job.result()
        if self._stream is not None and self._main is not None:
            self._main.wait_stream(self._stream)

    def close(self) -> None:
        """Ends the worker, behind all that was issued."""
        self._worker.shutdown()

    def _mark(self) -> Any:
        return self._main.record_event() if self._main is not None else None

    def _out(self, unit: int, parts: Sequence[Tensor], mark: Any, unused: Event | None) -> None:
        with self._turn(mark):
            pairs = [(part, self._buffer(part)) for part in parts]
            for part, copy in pairs:
                copy.copy_(part, non_blocking=True)
        self._settle()
        if unused is not None:
            unused.wait()
            self._settle_main()
        for part, _ in pairs:
            part.untyped_storage().resize_(0)
            resized(part)
        self._away[unit] = pairs

    def _back(self, unit: int, mark: Any) -> None:
        pairs = self._away.pop(unit)
        with torch.cuda.stream(self._main) if self._cuda else nullcontext():
            for part, copy in pairs:
                part.untyped_storage().resize_(copy.nbytes)
                resized(part)
        if self._stream is not None and self._main is not None:
            # What lay there before may still be read by work that was issued meanwhile.
            self._stream.wait_stream(self._main)
        with self._turn(mark):
            for part, copy in pairs:
                part.copy_(copy, non_blocking=True)
        self._settle()

    def _buffer(self, part: Tensor) -> Tensor:
        return torch.empty_like(part, device="cpu", pin_memory=self._cuda)

    def _turn(self, mark: Any) -> Any:
        """The stream of copies, behind `mark`."""
        if self._stream is None:
            return nullcontext()
        self._stream.wait_event(mark)
        return torch.cuda.stream(self._stream)

    def _settle(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _settle_main(self) -> None:
        if self._main is not None:
            self._main.synchronize()


def measured_bandwidth(device: torch.device, size: int = 2**24, repeats: int = 3) -> int:
    """Bytes per second of a copy to the host: the best of `repeats`."""
    cuda = device.type == "cuda"
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.ones(size, dtype=torch.uint8, pin_memory=cuda)
    best = float("inf")
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        target.copy_(source)
        best = min(best, time.perf_counter() - begin)
    return max(1, int(size / best))
