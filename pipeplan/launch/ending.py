"""How a run ends early: a failure that leaves no rank hanging, or a signal at a step boundary."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from pipeplan.errors import PipeplanError, RankError
from pipeplan.runtime.place import Place
from pipeplan.runtime.recorder import Recorder
from pipeplan.runtime.transport import GlooTransport, LocalTransport


def fail(
    error: Exception,
    place: Place,
    recorder: Recorder | None,
    out: Path | None,
    transport: GlooTransport | LocalTransport | None = None,
) -> NoReturn:
    """One line on stderr, details in a file, and out without waiting for anyone.

    Closing the connections tells the other ranks within milliseconds; a clean shutdown would wait
    for them instead. Ranks fail one after the other as they miss each other, so each also tells
    what the first of them said: that one names the culprit.
    """
    line = f"error: {_what(error, place, transport)}"
    if transport is not None:
        first = transport.first_failure(line.removeprefix("error: "))
        line += "" if first in line else f"; the first rank to fail said: {first}"
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        details = out / f"rank{place.rank}.error.txt"
        text = "".join(traceback.format_exception(error))
        details.write_text(text + "\n" + (recorder.report() if recorder else ""), encoding="utf-8")
        line += f" (traceback and last actions: {details})"
    print(line, file=sys.stderr, flush=True)
    os._exit(error.exit_code if isinstance(error, PipeplanError) else 1)


def _what(error: Exception, place: Place, transport: GlooTransport | LocalTransport | None) -> str:
    """The error with its rank, and the ranks that are gone if it does not name one."""
    if isinstance(error, PipeplanError) and not isinstance(error, RankError):
        return str(error)
    text = str(error)
    if not isinstance(error, RankError):
        text = f"rank {place.rank}: {type(error).__name__}: {error}"
    lost = transport.lost_peers() if transport is not None and "peer rank" not in text else []
    return text + (f" (no connection to peer rank {', '.join(map(str, lost))})" if lost else "")


class StopSignal:
    """A signal as a wish to stop at the next step boundary; a second one kills.

    SIGINT, SIGTERM, or SIGUSR1, which schedulers send some time before they end a job.
    """

    def __init__(self) -> None:
        self.number: int | None = None

    def wanted(self) -> bool:
        """Whether a signal has come."""
        return self.number is not None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catches the signals inside."""
        names = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        before = [signal.signal(name, self._note) for name in names]
        try:
            yield
        finally:
            for name, handler in zip(names, before, strict=True):
                signal.signal(name, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.number = number
        signal.signal(number, signal.SIG_DFL)
