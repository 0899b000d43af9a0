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

from pipeplan.errors import PipeplanError
from pipeplan.runtime.place import Place
from pipeplan.runtime.recorder import Recorder


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
