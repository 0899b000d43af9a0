"""Copies between a device and its host, in order of issue, beside the caller's computes.

`runtime` moves what stages keep, `rematerialized` moves units of one module: they differ in whom
the bytes belong to, not in how they travel. On CUDA the copies go through pinned memory (`pinned`)
on streams of their own; on a processor a worker's thread copies.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pipeplan.pinned import PinnedPool

Copies = list[Tensor]
"""On the host; one per tensor that left."""


class CopyEngine:
    """The way between one device and its host: one worker, or one for each direction."""

    def __init__(
        self, device: torch.device, *, duplex: bool, pinned: PinnedPool | None = None
    ) -> None:
        """Starts nothing: workers begin with their first copy and end with this object.

        Args:
            device: where the tensors are.
            duplex: whether both directions run at once; otherwise one copy at a time.
            pinned: what copies on the host lie in, for a CUDA device; None: a pool of its own.
        """
        self._device = device
        self._pinned = pinned or PinnedPool()
        self._out = _CopyStream(device)
        self._back = _CopyStream(device) if duplex else self._out

    def out(self, parts: list[Tensor], then: Callable[[], None] | None = None) -> Future[Copies]:
        """Copy tensors to the host.

        Args:
            parts: emptied, so that nothing here keeps them alive behind the end of the copy.
            then: runs in the worker behind the copy, on the caller's stream.
        """
        caller, mark = self._now()

        def work() -> Copies:
            with _named(f"copy of {_bytes(parts)} bytes to the host"), self._out.copying(mark):
                copies = [self._buffer(part) for part in parts]
                _copy(copies, parts)
            parts.clear()
            if then is not None:
                with torch.cuda.stream(caller):
                    then()
            return copies

        return self._out.worker.submit(work)

    def back(
        self,
        parts: list[Tensor],
        copies: Callable[[], Copies],
        first: Callable[[], None] | None = None,
    ) -> Future[None]:
        """Copy what `out` gave back into tensors.

        Args:
            parts: emptied, as those of `out`; `first` may add to them.
            copies: what goes into each; asked for in the worker.
            first: runs in the worker before the copy, on the caller's stream, and makes room.
        """
        caller, mark = self._now()

        def work() -> None:
            if first is not None:
                with torch.cuda.stream(caller):
                    first()
                # What lay there before may still be read by work that was issued meanwhile.
                self._back.follow(caller)
            with _named(f"copy of {_bytes(parts)} bytes from the host"):
                kept = copies()  # until they are copied: nobody else may keep them
                with self._back.copying(mark):
                    _copy(parts, kept)
            parts.clear()

        return self._back.worker.submit(work)

    def join(self) -> None:
        """Lets the caller's stream go on behind all copies that have ended here."""
        caller = self._stream()
        for lane in (self._out, self._back):
            if caller is not None and lane.stream is not None:
                caller.wait_stream(lane.stream)

    def settle(self) -> None:
        """Returns when the device has computed all that the caller's stream was given."""
        caller = self._stream()
        if caller is not None:
            caller.synchronize()

    def close(self) -> None:
        """Ends the workers, behind all that was issued."""
        self._out.worker.shutdown()
        self._back.worker.shutdown()

    def _stream(self) -> Any:
        """Asked for at each call: users switch streams, and each thread has one of its own."""
        is_cuda = self._device.type == "cuda"
        return torch.cuda.current_stream(self._device) if is_cuda else None

    def _now(self) -> tuple[Any, Any]:
        """The caller's stream, and an event behind all that it was given."""
        caller = self._stream()
        return caller, caller.record_event() if caller is not None else None

    def _buffer(self, part: Tensor) -> Tensor:
        if self._device.type == "cuda":
            return self._pinned.empty_like(part)
        return torch.empty_like(part, device="cpu")


def thread_of_caller(name: str) -> ThreadPoolExecutor:
    """One thread that computes with as many threads as the caller, on the GPU that it is on.

    Whoever leaves a stream is on the GPU of the stream before: a thread that has chosen none is
    on the first GPU then, and takes memory there.
    """
    gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else None
    threads = torch.get_num_threads()

    def begin() -> None:
        torch.set_num_threads(threads)
        if gpu is not None:
            torch.cuda.set_device(gpu)

    return ThreadPoolExecutor(1, thread_name_prefix=f"pipeplan-{name}", initializer=begin)


class _CopyStream:
    """A worker, and on CUDA the stream of its copies."""

    def __init__(self, device: torch.device) -> None:
        self.worker = thread_of_caller("host")
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def follow(self, caller: Any) -> None:
        """Copies wait for all that the device was given before."""
        if self.stream is not None:
            self.stream.wait_stream(caller)

    @contextmanager
    def copying(self, mark: Any) -> Iterator[None]:
        """Around copies that begin behind `mark`; returns when they have ended."""
        if self.stream is None:
            yield
            return
        self.stream.wait_event(mark)
        with torch.cuda.stream(self.stream):
            yield
        self.stream.synchronize()


@contextmanager
def _named(what: str) -> Iterator[None]:
    """An error in a worker comes up far from its cause: it says which copy failed."""
    try:
        yield
    except Exception as error:
        raise RuntimeError(f"{what}: {error}") from error


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)


def _bytes(parts: Sequence[Tensor]) -> int:
    return sum(part.nbytes for part in parts)


def flat(storage: torch.UntypedStorage) -> Tensor:
    """The whole of `storage` as one tensor of bytes."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


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
