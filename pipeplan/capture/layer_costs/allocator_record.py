"""Bytes by the allocator's own record: for compiled code, whose tensors no dispatcher sees.

`livebytes` counts what operations return. Compiled code takes its buffers from the allocator
directly, so here the allocator tells: on CUDA by its counters, on the processor by the profiler.
Counted are the bytes asked for. What a generated kernel takes without the allocator is not seen,
as little as scratch inside an operation is where operations are counted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile


class RecordedBytes:
    """While entered, bytes that have been taken and not given back since: `live`, `peak`."""

    def __init__(self) -> None:
        self._live = self._peak = 0

    @property
    def live(self) -> int:
        """Bytes now, above those at the beginning."""
        self._look()
        return self._live

    @property
    def peak(self) -> int:
        """Most bytes since the beginning or the last `reset_peak`."""
        self._look()
        return self._peak

    def reset_peak(self) -> None:
        """Forgets the past: the peak is what lives now."""
        self._look()
        self._peak = self._live

    def __enter__(self) -> Self:
        """Begins."""
        raise NotImplementedError

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        place: TracebackType | None,
    ) -> None:
        """Ends."""
        raise NotImplementedError

    def _look(self) -> None:
        raise NotImplementedError


def recorded(device: torch.device) -> RecordedBytes:
    """What tells of the allocator of `device`."""
    return _OfCuda(device) if device.type == "cuda" else _OfProcessor()


class _OfCuda(RecordedBytes):
    """By the counters of torch's caching allocator."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._base = 0

    def __enter__(self) -> Self:
        self._base = self._counter("current")
        torch.cuda.reset_peak_memory_stats(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def _look(self) -> None:
        self._live = self._counter("current") - self._base
        self._peak = max(self._peak, self._counter("peak") - self._base)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)
        self._peak = 0
        self._look()

    def _counter(self, name: str) -> int:
        return int(torch.cuda.memory_stats(self._device).get(f"requested_bytes.all.{name}", 0))


class _OfProcessor(RecordedBytes):
    """By the profiler, one recording from each look to the next.

    What was taken before the beginning is not missed when it is given back.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now: profile | None = None

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _begin(self) -> None:
        self._now = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with _muted():
            self._now.__enter__()

    def _end(self) -> None:
        now, self._now = self._now, None
        assert now is not None
        with _muted():
            now.__exit__(None, None, None)
        results = now.profiler.kineto_results if now.profiler else None
        assert results is not None
        changes = [event for event in results.events() if event.name() == "[memory]"]
        for event in sorted(changes, key=lambda event: event.start_ns()):
            self._live += event.nbytes()  # type: ignore[attr-defined]
            self._peak = max(self._peak, self._live)

    def _look(self) -> None:
        if self._now is not None:
            self._end()
            self._begin()


@contextmanager
def _muted() -> Iterator[None]:
    """Keeps back what the profiler's library writes to stderr, whoever reads it."""
    sys.stderr.flush()
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
