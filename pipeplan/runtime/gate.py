"""How all ranks stop after the same step although each is somewhere else in the program.

A rank that wants to stop says so on a board that all ranks read. From then on none begins another
step by itself: each writes how many it has begun, and once all have written, all know how many
anyone has begun. These steps are finished, the next one is left out. Each rank has a thread for
it, so that the answer does not wait for a long operation or for a message; while nobody wants to
stop, nothing is asked and nobody waits.
"""

from __future__ import annotations

import threading
import time
from typing import Protocol

from torch.distributed.distributed_c10d import Store

from pipeplan.errors import RankError

_LOOK_S = 0.25
_STOP = "stop"


class Board(Protocol):
    """Where ranks write for all to read."""

    def offer(self, name: str, text: str) -> None:
        """Write `text` under `name`, if nobody has."""

    def read(self, name: str) -> str | None:
        """What is written under `name`, if anything is."""


class StoreBoard:
    """A board in the ranks' store."""

    def __init__(self, store: Store) -> None:
        """Takes a store that nothing else uses."""
        self._store = store

    def offer(self, name: str, text: str) -> None:
        """See `Board`."""
        self._store.compare_set(name, "", text)

    def read(self, name: str) -> str | None:
        """See `Board`."""
        return self._store.get(name).decode() if self._store.check([name]) else None


class LocalBoard:
    """A board for the ranks of one process."""

    def __init__(self) -> None:
        """Nothing is written."""
        self._texts: dict[str, str] = {}

    def offer(self, name: str, text: str) -> None:
        """See `Board`."""
        self._texts.setdefault(name, text)

    def read(self, name: str) -> str | None:
        """See `Board`."""
        return self._texts.get(name)


class Wish(Protocol):
    """Whether a rank wants to stop."""

    def wanted(self, seconds: float) -> bool:
        """Whether it does, after `seconds` at most."""

    def wake(self) -> None:
        """Let `wanted` return at once."""


class Gate(Protocol):
    """Asked before each step."""

    def begin_step(self, step: int) -> bool:
        """Whether this rank may begin `step`; steps come in order."""


class Open:
    """A gate for runs that nobody stops."""

    def begin_step(self, step: int) -> bool:
        """See `Gate`."""
        return True


class Stopping:
    """One rank's side of a gate that any rank can close."""

    def __init__(
        self,
        board: Board,
        rank: int,
        ranks: int,
        wish: Wish,
        *,
        first: int,
        timeout_s: float,
    ) -> None:
        """Begins to look for a rank that wants to stop.

        Args:
            board: of all ranks, used by nothing else.
            rank: this one among them.
            ranks: how many there are.
            wish: whether this rank wants to stop.
            first: steps that were done before.
            timeout_s: longest wait for the other ranks.
        """
        self._board, self._rank, self._ranks = board, rank, ranks
        self._wish, self._timeout_s = wish, timeout_s
        self._changed = threading.Condition()
        self._asked = False
        self._begun = first
        self._end: int | None = None
        self._failure: Exception | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def ask(self) -> None:
        """Let all ranks stop."""
        with self._changed:
            self._asked = True
        self._wish.wake()

    def begin_step(self, step: int) -> bool:
        """See `Gate`; waits while the ranks agree.

        Raises:
            RankError: if they do not.
        """
        with self._changed:
            self._changed.wait_for(self._settled, self._timeout_s)
            if self._asked and self._end is None:
                why = self._failure or "a rank says nothing"
                raise RankError(
                    f"rank {self._rank}: the ranks do not agree where to stop: {why}"
                ) from self._failure
            if self._end is not None and step >= self._end:
                return False
            self._begun = max(self._begun, step + 1)
            return True

    def close(self) -> None:
        """Stop looking."""
        self._over.set()
        self._wish.wake()
        self._thread.join()

    def _settled(self) -> bool:
        return not self._asked or self._end is not None or self._failure is not None

    def _look(self) -> None:
        try:
            while not self._over.is_set():
                if self._wish.wanted(_LOOK_S) or self._asked:
                    self._board.offer(_STOP, "")
                if self._board.read(_STOP) is not None:
                    self._agree()
                    return
        except RuntimeError as error:  # a store that is gone, with the process that kept it
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _agree(self) -> None:
        with self._changed:
            self._asked = True
            begun = self._begun
        self._board.offer(f"begun{self._rank}", str(begun))
        told: dict[int, int] = {}
        while len(told) < self._ranks and not self._over.is_set():
            for rank in set(range(self._ranks)) - told.keys():
                if (text := self._board.read(f"begun{rank}")) is not None:
                    told[rank] = int(text)
            time.sleep(_LOOK_S / 25)
        with self._changed:
            self._end = max(told.values(), default=begun)
            self._changed.notify_all()
