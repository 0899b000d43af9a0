"""All ranks in one process, one after the other: fast, deterministic runs for tests and checks.

Each rank has a thread, but only the one whose turn it is runs; it passes the turn on where it must
wait. torch's random generator is one per process, so free threads would disturb each other's
dropout; a layer never waits, so its forward is undisturbed. When every rank waits,
the program is in deadlock and says so at once instead of hanging.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from pipeplan.errors import DeadlockError, RankError
from pipeplan.runtime.transport.base import Pending, Transport

_Result = TypeVar("_Result")


class RoundRobinScheduler:
    """Lets one of several threads run; passes on in rank order to the next that can go on."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._turn = threading.Condition()
        self._holder = 0
        self._waits: list[tuple[Callable[[], bool], str] | None] = [None] * size
        self._over: set[int] = set()
        self.failure: BaseException | None = None

    def start(self, rank: int) -> None:
        """Block until it is `rank`'s first turn."""
        with self._turn:
            self._await_turn(rank)

    def wait(self, rank: int, ready: Callable[[], bool], what: str) -> None:
        """Block until `ready()`, letting others run; `what` names it in a deadlock."""
        if ready():
            return
        with self._turn:
            self._waits[rank] = (ready, what)
            self._pass_on(rank)
            self._await_turn(rank)
            self._waits[rank] = None

    def finish(self, rank: int, failure: BaseException | None) -> None:
        """Say that `rank` is done; a failure stops all others."""
        with self._turn:
            self._over.add(rank)
            self.failure = self.failure or failure
            if len(self._over) < self._size:
                self._pass_on(rank)

    def _pass_on(self, rank: int) -> None:
        for candidate in ((rank + i) % self._size for i in range(1, self._size + 1)):
            wait = self._waits[candidate]
            if candidate not in self._over and (wait is None or wait[0]()):
                self._holder = candidate
                break
        else:
            cycle = [f"rank {r} waits for {w[1]}" for r, w in enumerate(self._waits) if w]
            message = "program: every rank waits:\n  " + "\n  ".join(cycle)
            self.failure = self.failure or DeadlockError(message, cycle)
        self._turn.notify_all()

    def _await_turn(self, rank: int) -> None:
        while self._holder != rank and self.failure is None:
            self._turn.wait()
        if self.failure is not None:
            raise RankError(f"rank {rank}: stopped because another rank failed")


class _MailboxMessage:
    """One message; either end may be known first. The copy happens when both are."""

    def __init__(self) -> None:
        self.sent: Tensor | None = None
        self.buffer: Tensor | None = None
        self.done = False

    def add(self, sent: Tensor | None, buffer: Tensor | None) -> None:
        self.sent = self.sent if sent is None else sent
        self.buffer = self.buffer if buffer is None else buffer
        if self.sent is not None and self.buffer is not None:
            self.buffer.data.copy_(self.sent)  # a link tells autograd nothing of what it writes
            self.sent = self.buffer = None
            self.done = True


class InProcTransport:
    """One rank of a `run_ranks`."""

    def __init__(self, world: _World, rank: int) -> None:
        self.rank, self.size = rank, world.size
        self._world = world
        self._asked = 0

    def send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """See `Transport`."""
        return self._post((self.rank, peer, tag), tensor, None)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """See `Transport`."""
        return self._post((peer, self.rank, tag), None, tensor)

    def flush(self) -> None:
        """A message is complete, or its sender still waits for it."""

    def gather(self, value: object) -> list[Any]:
        """See `Transport`."""
        ballot = self._answer(value)
        self._world.scheduler.wait(self.rank, lambda: len(ballot) == self.size, "all ranks")
        return [ballot[rank] for rank in range(self.size)]

    def _answer(self, value: object) -> dict[int, Any]:
        ballot = self._world.ballots.setdefault(self._asked, {})
        self._asked += 1
        ballot[self.rank] = value
        return ballot

    def _post(
        self, channel: tuple[int, int, int], sent: Tensor | None, buffer: Tensor | None
    ) -> Pending:
        queue = self._world.channels.setdefault(channel, deque())
        missing = (m for m in queue if (m.sent if buffer is None else m.buffer) is None)
        message = next(missing, None)
        if message is None:
            message = _MailboxMessage()
            queue.append(message)
        message.add(sent, buffer)
        if message.done:
            queue.remove(message)
        what = "message {} -> {}, tag {}".format(*channel)
        return _Wait(self, lambda: message.done, what)

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Let other ranks run until `ready()`."""
        self._world.scheduler.wait(self.rank, ready, what)


class _Wait:
    """A pending message."""

    def __init__(self, transport: InProcTransport, ready: Callable[[], bool], what: str) -> None:
        self._transport, self._ready, self._what = transport, ready, what

    def wait(self) -> None:
        self._transport.wait(self._ready, self._what)


class _World:
    """What the ranks of one process share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.scheduler = RoundRobinScheduler(size)
        self.channels: dict[tuple[int, int, int], deque[_MailboxMessage]] = {}
        self.ballots: dict[int, dict[int, Any]] = {}


def run_ranks(size: int, work: Callable[[Transport], _Result]) -> list[_Result]:
    """`work` of every rank, in turns.

    Args:
        size: number of ranks.
        work: called once per rank with that rank's transport.

    Returns:
        The results, by rank.

    Raises:
        DeadlockError: if all ranks wait for each other; `cycle` says what for.
    """
    world = _World(size)
    results: dict[int, _Result] = {}

    def body(rank: int) -> None:
        failure: BaseException | None = None
        try:
            world.scheduler.start(rank)
            results[rank] = work(InProcTransport(world, rank))
        except BaseException as error:
            failure = error
        world.scheduler.finish(rank, failure)

    threads = [threading.Thread(target=body, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if world.scheduler.failure is not None:
        raise world.scheduler.failure
    return [results[rank] for rank in range(size)]
