"""How all ranks stop at the same step although each is somewhere else in the program.

Before its first action of a step every rank answers "shall we stop?"; the answers to an earlier
question, `lag` steps back, decide whether this step is begun. Every rank reads the same answer at
the same place of its list, so all cut the program at the same step, and nobody waits: by the time
a rank begins step t every other rank has begun step t - lag. For flush lag = 1 is enough because
steps do not overlap; for 2bw lag = 2: rule (R6) lets the first stage begin step t only after its
last backward of step t-2, which follows every rank's first action of step t-2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pipeplan.plan import Semantics
from pipeplan.runtime.messages import Transport, Vote


class Gate:
    """One rank's side of the votes."""

    def __init__(
        self, transport: Transport, semantics: Semantics, wants_stop: Callable[[], bool]
    ) -> None:
        """Asks `wants_stop` once per step; a rank that gets a signal answers yes from then on."""
        self._transport = transport
        self._lag = 2 if semantics == "2bw" else 1
        self._wants_stop = wants_stop
        self._votes: deque[Vote] = deque()
        self._first = 0
        self._next = 0

    def begin(self, first: int) -> None:
        """Say that a run starts from an empty pipeline at step `first`."""
        self._first = self._next = first

    def first_refused(self, step: int) -> int | None:
        """Ask for every step up to `step` that was not asked for yet.

        Returns:
            The first step that all ranks leave out, with everything behind it; None if they may
            begin `step`.
        """
        while self._next <= step:
            asked = self._next
            self._next += 1
            self._votes.append(self._transport.vote(self._wants_stop()))
            if asked - self._first >= self._lag and self._votes.popleft().wait():
                return asked
        return None

    def finish(self) -> None:
        """Say that the run is over: read the answers that nobody needed."""
        while self._votes:
            self._votes.popleft().wait()
