"""Who is to blame when a run stops: every rank tells what it is doing, those in trouble read it.

A rank that misses a peer knows only its neighbour, which may itself wait for another one. So each
rank keeps a thread that looks for an alarm in the ranks' store; once there is one, it writes down
what the main thread does: an action and the peers it waits for, if it waits. A failing rank raises
the alarm, follows these reports from its own peer on, and arrives at ranks that wait for nobody,
or that say nothing any more: those are to blame. Whoever fails later only reads this verdict, so
that a long pipeline stops as fast as a short one.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from types import FrameType

from torch.distributed.distributed_c10d import Store

from pipeplan.errors import PipeplanError, RankError
from pipeplan.runtime.transport.base import wait_all, wait_for
from pipeplan.runtime.transport.gloo import GlooTransport, LocalTransport

_LOOK_S = 0.25
_PATIENCE_S = 1.0
"""How long a living rank may take to answer."""
_ASK = timedelta(seconds=1)
_ALARM, _VERDICT = "alarm", "verdict"


@dataclass(frozen=True, slots=True)
class RankActivity:
    """What one rank does, and the ranks it waits for."""

    text: str
    peers: tuple[int, ...] = ()


class FailureAttribution:
    """One rank's side."""

    def __init__(self, store: Store, rank: int, tell: Callable[[bool], RankActivity]) -> None:
        """Begins to look for alarms.

        Args:
            store: shared by all ranks, used by nothing else.
            rank: this rank.
            tell: whether the main thread waits for a message -> what it does.
        """
        self._store, self._rank, self._tell = store, rank, tell
        self._main = threading.get_ident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking."""
        self._over.set()
        if self._thread is not threading.current_thread():  # which may collect garbage
            self._thread.join()

    def blame(self, report: RankActivity) -> str:
        """Tell all ranks that this one fails with `report`; who is to blame, in words.

        Empty if this rank's report says all there is to say.
        """
        patience: timedelta = self._store.timeout  # type: ignore[attr-defined]  # of others, too
        try:
            self._store.set_timeout(_ASK)
            self._write(report)
            self._store.set(_ALARM, "")
            if not report.peers:
                return ""
            if self._store.check([_VERDICT]):
                return str(self._store.get(_VERDICT).decode())
            guilty = self._follow(report.peers)
            said = "; ".join(
                f"to blame: peer rank {rank}, {text}" for rank, text in guilty.items()
            )
            if said:
                self._store.set(_VERDICT, said)
        except RuntimeError:
            return ""
        finally:
            self._store.set_timeout(patience)
        return said

    def _follow(self, peers: Iterable[int]) -> dict[int, str]:
        deadline = time.monotonic() + _PATIENCE_S
        guilty: dict[int, str] = {}
        seen, ahead = {self._rank}, list(peers)
        while ahead:
            rank = ahead.pop(0)
            if rank in seen:
                continue
            seen.add(rank)
            told = self._read(rank, deadline)
            if told is None:
                guilty[rank] = "which is gone or says nothing"
            elif told.peers:
                ahead += told.peers
            else:
                guilty[rank] = f"which says: {told.text}"
        return guilty

    def _read(self, rank: int, deadline: float) -> RankActivity | None:
        name = f"report{rank}"
        while not self._store.check([name]):
            if time.monotonic() > deadline:
                return None
            time.sleep(_LOOK_S / 10)
        told = json.loads(self._store.get(name))
        return RankActivity(told["text"], tuple(told["peers"]))

    def _write(self, report: RankActivity) -> None:
        self._store.set(f"report{self._rank}", json.dumps(asdict(report)))

    def _look(self) -> None:
        with suppress(RuntimeError):  # without a store there is nobody to tell
            while not self._over.wait(_LOOK_S):
                if self._store.check([_ALARM]):
                    frame = sys._current_frames().get(self._main)  # noqa: SLF001
                    if not self._store.check([f"report{self._rank}"]):
                        told, missed = self._tell(_waits(frame)), _missed(frame)
                        self._write(replace(told, peers=missed) if missed else told)
                    return


def activity_of(
    error: BaseException, rank: int, transport: GlooTransport | LocalTransport | None
) -> RankActivity:
    """The error of `rank`, and the ranks that may be to blame for it.

    Outside the executor nobody says which peer was missed: then it is one that cannot be reached.
    """
    where, text, peers = "", str(error), list[int]()
    if isinstance(transport, GlooTransport) and transport.replicas > 1:
        where = f"replica {transport.replica}: "
    if not isinstance(error, PipeplanError):
        text = f"rank {rank}: {type(error).__name__}: {error}"
    if isinstance(error, RankError) and error.peers:
        peers = list(error.peers)
    elif isinstance(error, RankError) or not isinstance(error, PipeplanError):
        peers = transport.lost_peers() if transport is not None else []
    return RankActivity(where + text, tuple(peers))


def _waits(frame: FrameType | None) -> bool:
    """Whether the innermost of our frames is one that waits for other ranks."""
    while frame is not None:
        code = frame.f_code
        if code is wait_all.__code__ or code.co_filename.endswith("distributed_c10d.py"):
            return True
        frame = frame.f_back
    return False


def _missed(frame: FrameType | None) -> tuple[int, ...]:
    """The one rank that one of our frames waits for, where it says so."""
    while frame is not None:
        if frame.f_code is wait_for.__code__:
            return (frame.f_locals["peer"],)
        frame = frame.f_back
    return ()
