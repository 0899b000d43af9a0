"""How a run ends early: a failure that leaves no rank hanging, or a signal at a step boundary."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from pipeplan.errors import DisagreementError, PipeplanError
from pipeplan.runtime.supervision.failure_attribution import FailureAttribution, activity_of
from pipeplan.runtime.supervision.flight_recorder import FlightRecorder
from pipeplan.runtime.transport.gloo import GlooTransport, LocalTransport
from pipeplan.runtime.transport.torchrun_env import TorchrunEnv

_PART_S = 1.0
"""How long others let rank 0 speak when all know the same."""


def fail(
    error: BaseException,
    place: TorchrunEnv,
    recorder: FlightRecorder | None,
    out: Path | None,
    transport: GlooTransport | LocalTransport | None = None,
    attribution: FailureAttribution | None = None,
) -> NoReturn:
    """One line on stderr, details in a file, and out without waiting for anyone.

    Closing the connections tells the other ranks within milliseconds; a clean shutdown would wait
    for them instead. Before that the rank asks the others who is to blame (`FailureAttribution`).
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends its ranks: let this one speak
    activity = activity_of(error, place.rank, transport)
    blamed = attribution.blame(activity) if attribution is not None else ""
    line = f"error: {activity.text}" + (f"; {blamed}" if blamed else "")
    if out is not None:
        line += f" ({_details(error, recorder, out / f'rank{place.rank}.error.txt')})"
    print(line, file=sys.stderr, flush=True)
    os._exit(error.exit_code if isinstance(error, PipeplanError) else 1)


def give_up(rank: int, why: str) -> NoReturn:
    """One line and out, from a thread, where the main one waits inside of CUDA for ever."""
    print(
        f"error: rank {rank}: {why}, and this rank waits for its GPU", file=sys.stderr, flush=True
    )
    os._exit(1)


def part(error: DisagreementError, place: TorchrunEnv) -> int:
    """Rank 0 says it once for all; the others leave it the time, or a launcher would end it."""
    if place.rank:
        time.sleep(_PART_S)
    else:
        print(f"error: {error}", file=sys.stderr, flush=True)
    return error.exit_code


def _details(error: BaseException, recorder: FlightRecorder | None, file: Path) -> str:
    """Write traceback and last actions to `file`; where they are, or why they are nowhere.

    What failed may have been the directory itself: the line about it must come out.
    """
    text = "".join(traceback.format_exception(error))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n" + (recorder.report() if recorder else ""), encoding="utf-8")
    except OSError as refused:
        return f"traceback and last actions could not be written: {refused}"
    return f"traceback and last actions: {file}"


class StopSignal:
    """A signal as a wish to stop at the next step boundary; a second one kills.

    SIGINT, SIGTERM, or SIGUSR1, which schedulers send some time before they end a job. Python
    calls a handler only between two of the main thread's own steps, which a long operation or a
    wait for a message delays. So the signal's number also comes through a socket, at once.
    """

    NAMES = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.number: int | None = None
        self._said, self._heard = socket.socketpair()
        for end in (self._said, self._heard):
            end.setblocking(False)

    def wanted(self, seconds: float) -> bool:
        """Whether a signal has come, after `seconds` at most."""
        if self.number is None and select.select([self._heard], [], [], seconds)[0]:
            caught = [number for number in self._heard.recv(64) if number in self.NAMES]
            self.number = self.number or (caught[0] if caught else None)
        return self.number is not None

    def wake(self) -> None:
        """Let `wanted` return at once."""
        self._said.send(bytes(1))

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catches the signals inside."""
        before = [signal.signal(name, self._note) for name in self.NAMES]
        fd = signal.set_wakeup_fd(self._said.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(fd)
            for name, handler in zip(self.NAMES, before, strict=True):
                signal.signal(name, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.number = number
        signal.signal(number, signal.SIG_DFL)
