"""Joining the ranks, and leaving so that one failing rank never leaves the others hanging."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NoReturn

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from pipeplan.errors import PipeplanError
from pipeplan.launch.options import Place
from pipeplan.runtime.recorder import Recorder
from pipeplan.runtime.transport import GlooTransport, LocalTransport


def join(place: Place, timeout_ns: int) -> GlooTransport | LocalTransport:
    """A transport between all ranks that torchrun started.

    The store is wrapped per attempt: after a restart the agent's store still holds the addresses
    of the ranks that died.
    """
    if place.size == 1:
        return LocalTransport()
    timeout = timedelta(microseconds=timeout_ns // 1000)
    store, rank, size = next(rendezvous("env://", place.rank, place.size, timeout=timeout))
    return GlooTransport(PrefixStore(f"attempt{place.attempt}", store), rank, size, timeout)


def fail(error: Exception, place: Place, recorder: Recorder | None, out: Path | None) -> NoReturn:
    """One line on stderr, details in a file, and out without waiting for anyone.

    Closing the connections tells the other ranks within milliseconds; a clean shutdown would wait
    for them instead.
    """
    line = f"error: rank {place.rank}: {type(error).__name__}: {error}"
    if isinstance(error, PipeplanError):
        line = f"error: {error}"
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        details = out / f"rank{place.rank}.error.txt"
        text = "".join(traceback.format_exception(error))
        details.write_text(text + "\n" + (recorder.report() if recorder else ""), encoding="utf-8")
        line += f" (traceback and last actions: {details})"
    print(line, file=sys.stderr, flush=True)
    os._exit(error.exit_code if isinstance(error, PipeplanError) else 1)


class StopSignal:
    """SIGINT or SIGTERM as a wish to stop at the next step boundary; a second one kills."""

    def __init__(self) -> None:
        self.number: int | None = None

    def wanted(self) -> bool:
        """Whether a signal has come."""
        return self.number is not None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catches both signals inside."""
        names = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(name, self._note) for name in names]
        try:
            yield
        finally:
            for name, handler in zip(names, before, strict=True):
                signal.signal(name, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.number = number
        signal.signal(number, signal.SIG_DFL)
