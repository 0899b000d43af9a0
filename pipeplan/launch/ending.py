"""How a run ends early: a failure that leaves no rank hanging."""

from __future__ import annotations

import os
import signal
import time
import traceback
from pathlib import Path
from typing import NoReturn

from pipeplan.errors import DisagreementError, InputError, PipeplanError
from pipeplan.launch.last_words import say
from pipeplan.runtime.checkpoint import storage
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
        line += _how_to_go_on(out)
    say(line)
    os._exit(error.exit_code if isinstance(error, PipeplanError) else 1)


def give_up(rank: int, why: str) -> NoReturn:
    """One line and out, from a thread, where the main one waits inside of CUDA for ever."""
    say(f"error: rank {rank}: {why}, and this rank waits for its GPU")
    os._exit(1)


def part(error: DisagreementError, place: TorchrunEnv) -> int:
    """Rank 0 says it once for all; the others leave it the time, or a launcher would end it."""
    if place.rank:
        time.sleep(_PART_S)
    else:
        say(f"error: {error}")
    return error.exit_code


def _how_to_go_on(out: Path) -> str:
    """Where there is a complete checkpoint; a folder that cannot be read has none."""
    try:
        return f"; {storage.latest(out).name} is complete: go on with --resume {out}"
    except (OSError, InputError):
        return ""


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
