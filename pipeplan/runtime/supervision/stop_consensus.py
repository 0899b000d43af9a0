"""How all ranks stop after the same step although each is somewhere else in the program.

A rank that wants to stop says so on a board that all ranks read. From then on none begins another
step or makes an update by itself: each writes how far it is, and once all have written, all know
which steps are kept. Each rank has a thread for it, so that the answer does not wait for a long
operation or for a message; while nobody wants to stop, nothing is asked and nobody waits.

Short steps that anyone has begun are finished. Where steps are long, a step that no rank has begun
to update is dropped: its operations are left out from the next micro-batch on, its messages travel
on with anything in them, so that every program ends where the others' do.
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict, dataclass
from typing import Protocol

from pipeplan.errors import RankError
from pipeplan.runtime.supervision.board import Board
from pipeplan.runtime.supervision.stop_request import StopRequest

LONG_S = 5.0
"""A begun step of this length is finished: with the drain it leaves time to save, of the 30 s that
torchrun waits."""
_SHARE = 0.01
"""Of a step's time, for being ready to drop it."""
_LOOK_S = 0.25
_STOP = "stop"


class StopConsensus(Protocol):
    """Asked before each step and each update."""

    def begin_step(self, step: int) -> bool:
        """Whether this rank may begin `step`; steps come in order."""

    def begin_update(self, step: int) -> bool:
        """Whether this rank may make the updates of `step`."""

    def may_drop(self, step: int) -> bool:
        """Whether `step`, which has begun, may end without an update."""

    def dropped(self, step: int) -> bool:
        """Whether `step` ends without an update: nothing of it is to be computed any more.

        What comes for it from other ranks may be anything.
        """

    def kept(self, steps: int) -> int:
        """Of that many steps from the first on, how many are updated."""

    def finish_all(self) -> None:
        """Say that no step of this rank may be dropped."""

    def expect(self, seconds: float) -> None:
        """Say how long this rank takes to be ready for a step that may be dropped."""


class NeverStop:
    """For runs that nobody stops."""

    def begin_step(self, step: int) -> bool:
        """See `StopConsensus`."""
        return True

    def begin_update(self, step: int) -> bool:
        """See `StopConsensus`."""
        return True

    def may_drop(self, step: int) -> bool:
        """See `StopConsensus`."""
        return False

    def dropped(self, step: int) -> bool:
        """See `StopConsensus`."""
        return False

    def kept(self, steps: int) -> int:
        """See `StopConsensus`."""
        return steps

    def finish_all(self) -> None:
        """See `StopConsensus`."""

    def expect(self, seconds: float) -> None:
        """See `StopConsensus`."""


@dataclass(frozen=True, slots=True)
class _Stand:
    """How far a rank is."""

    begun: int
    """Steps."""
    sure: int
    """Steps that cannot be dropped: updated, or nothing kept to go back."""
    slow: bool
    """Whether its steps are too long to be finished."""


class BoardConsensus:
    """One rank's side of a consensus that any rank can ask for."""

    def __init__(
        self,
        board: Board,
        rank: int,
        ranks: int,
        wish: StopRequest,
        *,
        first: int,
        timeout_s: float,
        long_s: float = LONG_S,
    ) -> None:
        """Begins to look for a rank that wants to stop.

        Args:
            board: of all ranks, used by nothing else.
            rank: this one among them.
            ranks: how many there are.
            wish: whether this rank wants to stop.
            first: steps that were done before.
            timeout_s: longest wait for the other ranks.
            long_s: a step that takes longer is not finished.
        """
        self._board, self._rank, self._ranks = board, rank, ranks
        self._wish, self._timeout_s, self._long_s = wish, timeout_s, long_s
        self._changed = threading.Condition()
        self._asked = False
        self._begun = self._sure = self._updated = first
        self._since = time.monotonic()
        self._step_s = 0.0
        self._ready_s = 0.0
        self._finishes = False
        self._end: int | None = None
        self._kept: int | None = None
        self._failure: Exception | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def go_on(self, step: int) -> None:
        """Say that this rank goes on from `step`, with an empty pipeline; all ranks do."""
        with self._changed:
            self._begun = self._sure = self._updated = step

    def ask(self) -> None:
        """Let all ranks stop."""
        with self._changed:
            self._asked = True
        self._wish.wake()

    def begin_step(self, step: int) -> bool:
        """See `StopConsensus`; waits while the ranks agree.

        Raises:
            RankError: if they do not.
        """
        with self._changed:
            self._await_answer()
            if self._end is not None and step >= self._end:
                return False
            if self._begun == self._updated:
                self._since = time.monotonic()
            least_s = self._least_s()
            self._begun = max(self._begun, step + 1)
            if self._finishes or self._ready_s > _SHARE * least_s:
                self._sure = max(self._sure, step + 1)
            return True

    def begin_update(self, step: int) -> bool:
        """See `StopConsensus`; waits while the ranks agree.

        Raises:
            RankError: if they do not.
        """
        with self._changed:
            self._await_answer()
            if self.dropped(step):
                return False
            if step >= self._updated:
                now = time.monotonic()
                self._step_s, self._since, self._updated = now - self._since, now, step + 1
            self._sure = max(self._sure, step + 1)
            return True

    def may_drop(self, step: int) -> bool:
        """See `StopConsensus`."""
        return step >= self._sure

    def dropped(self, step: int) -> bool:
        """See `StopConsensus`; waits while the ranks agree.

        Who has not answered yet keeps the others from dropping anything. Once it has, it reads no
        message before it knows the answer, too.

        Raises:
            RankError: if they do not.
        """
        if self._asked and self._end is None:
            with self._changed:
                self._await_answer()
        return self._kept is not None and step >= self._kept

    def kept(self, steps: int) -> int:
        """See `StopConsensus`."""
        return steps if self._kept is None else min(steps, self._kept)

    def finish_all(self) -> None:
        """See `StopConsensus`."""
        self._finishes = True

    def expect(self, seconds: float) -> None:
        """See `StopConsensus`."""
        self._ready_s = seconds

    @property
    def lost(self) -> int:
        """Steps that were begun and dropped."""
        return (self._end or 0) - (self._kept or 0)

    def close(self) -> None:
        """Stop looking."""
        self._over.set()
        self._wish.wake()
        if self._thread is not threading.current_thread():  # which may collect garbage
            self._thread.join()

    def _await_answer(self) -> None:
        self._changed.wait_for(self._settled, self._timeout_s)
        if self._asked and self._end is None:
            why = self._failure or "a rank says nothing"
            raise RankError(
                f"rank {self._rank}: the ranks do not agree where to stop: {why}"
            ) from self._failure

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
            own = self._stand()
        self._board.offer(f"stand{self._rank}", json.dumps(asdict(own)))
        told: dict[int, _Stand] = {}
        while len(told) < self._ranks and not self._over.is_set():
            for rank in set(range(self._ranks)) - told.keys():
                if (text := self._board.read(f"stand{rank}")) is not None:
                    told[rank] = _Stand(**json.loads(text))
            time.sleep(_LOOK_S / 25)
        with self._changed:
            self._settle(list(told.values()) or [own])
            self._changed.notify_all()

    def _stand(self) -> _Stand:
        return _Stand(self._begun, self._sure, self._least_s() > self._long_s)

    def _least_s(self) -> float:
        """How long a step takes at least, in seconds: as the last one, or the open one so far."""
        open_s = time.monotonic() - self._since if self._begun > self._updated else 0.0
        return max(self._step_s, open_s)

    def _settle(self, stands: list[_Stand]) -> None:
        end = max(stand.begun for stand in stands)
        slow = any(stand.slow for stand in stands)
        self._kept = max(stand.sure for stand in stands) if slow else end
        self._end = end
