"""What an executor asks of whatever carries its messages, and how a lost peer is told.

A message whose other end is gone gives the same error wherever and however it is noticed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, NoReturn, Protocol, TypeVar

from torch import Tensor

_Result = TypeVar("_Result")


class PeerLostError(Exception):
    """The other end of a message is gone or silent for too long."""

    def __init__(self, message: str, peer: int | None = None) -> None:
        """Takes what happened, and the rank at the other end, where it is known."""
        super().__init__(message)
        self.peer = peer


class Pending(Protocol):
    """A message on its way."""

    def wait(self) -> object:
        """Return once the message is complete; raise if the peer is gone or takes too long."""


class Transport(Protocol):
    """What an executor needs from the outside world."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Hand a contiguous `tensor` to the link; it must live until `wait` has returned."""

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Post a receive into `tensor`, which is complete once `wait` has returned."""

    def flush(self) -> None:
        """Return once all that was sent arrives even if this process ends now."""

    def gather(self, value: object) -> list[Any]:
        """`value` of each rank, on every rank; everyone must call it."""


class WrappedTransport:
    """Passes everything on to another transport; a subclass changes what it needs to."""

    def __init__(self, transport: Transport) -> None:
        self.rank, self.size = transport.rank, transport.size
        self._transport = transport

    def send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """See `Transport`."""
        return self._transport.send(tensor, peer, tag)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """See `Transport`."""
        return self._transport.receive(tensor, peer, tag)

    def flush(self) -> None:
        """See `Transport`."""
        self._transport.flush()

    def gather(self, value: object) -> list[Any]:
        """See `Transport`."""
        return self._transport.gather(value)


def lost(error: RuntimeError) -> NoReturn:
    """A connection may be found closed while sending, posting or waiting: the same loss."""
    raise PeerLostError(str(error).rpartition("] ")[2]) from error


def wait_all(pending: Sequence[Pending]) -> None:
    """Wait for every message.

    Raises:
        PeerLostError: if the peer's connection is closed or the timeout has passed.
    """
    try:
        for message in pending:
            message.wait()
    except RuntimeError as error:
        lost(error)


def wait_for(peer: int, pending: Sequence[Pending]) -> None:
    """Wait for every message from or to one rank.

    Raises:
        PeerLostError: as `wait_all`; it names the rank.
    """
    try:
        wait_all(pending)
    except PeerLostError as error:
        raise PeerLostError(str(error), peer) from error


def interruptible(work: Callable[[], _Result]) -> _Result:
    """What `work` returns or raises, from a thread of its own, so that Ctrl-C is heard.

    Python runs signal handlers in the main thread, between two steps of its own. A wait of minutes
    in a library is one step: whoever presses Ctrl-C meanwhile would sit the timeout out.

    An exception of a signal handler leaves at once; the thread then ends with the process, and
    nothing more can be done with what it worked on.
    """
    results: SimpleQueue[tuple[_Result] | BaseException] = SimpleQueue()

    def run() -> None:
        try:
            results.put((work(),))
        except BaseException as error:
            results.put(error)

    threading.Thread(target=run, daemon=True).start()
    result = results.get()
    if isinstance(result, BaseException):
        raise result
    return result[0]
