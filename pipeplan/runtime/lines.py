"""Small messages between ranks of one machine: over sockets that the waiting thread reads itself.

A message over gloo wakes gloo's thread, which wakes the thread that waits: two idle cores, one
after the other. A line, one unix socket per pair of ranks, wakes the waiting thread and nobody
else. It carries what is small enough for the kernel to hold (`LIMIT_BYTES`) and is eager: `send`
hands the bytes over whether or not anybody waits for them, so a program that is safe where sends
block ((O6) of docs/model.md) is safe here. Each message says its tag and size first; what arrives
before its receive is posted is kept until then, so messages of different tags never wait for each
other and those of one tag keep their order.

Larger messages travel over gloo (rendezvous). Both ends choose the road by size alone.
Source: the eager and rendezvous protocols of MPI implementations.
"""

from __future__ import annotations

import ctypes
import select
import socket
from collections import defaultdict, deque
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta

from torch import Tensor

from pipeplan.errors import InternalError
from pipeplan.runtime.outgoing import (
    HEAD,
    INTERRUPTED,
    Outgoing,
    Pusher,
    Sent,
    bytes_of,
    closed,
    in_ms,
)
from pipeplan.runtime.peerloss import PeerLostError

LIMIT_BYTES = 2**17
"""The largest message of a line: kernels hold a few of these at least (416 KiB, unless told
otherwise), and one that is read late costs its reader some 10 us. Gloo reads while we compute."""

_LONGEST = timedelta(days=24)
"""That `poll` can wait (2^31 ms)."""


class Lines:
    """This rank's lines, by rank in the group."""

    def __init__(
        self,
        ends: Mapping[int, socket.socket] | None = None,
        timeout: timedelta = timedelta(),
        pusher: Pusher | None = None,
    ) -> None:
        """Takes connected stream sockets.

        Args:
            ends: by rank; none: every message takes the other road.
            timeout: longest wait for one message.
            pusher: of these lines and no others; None: one is started if it is needed.
        """
        self._pusher = pusher or (Pusher() if ends else None)
        self._lines: dict[int, Line] = {}
        if self._pusher and ends:
            for rank, end in ends.items():
                self._lines[rank] = Line(end, timeout, self._pusher)
            self._pusher.push_for(tuple(line.outgoing for line in self._lines.values()))
        else:
            self.close()

    def carrying(self, tensor: Tensor, rank: int) -> Line | None:
        """The line that takes a message like `tensor` to or from `rank`, if one does."""
        line = self._lines.get(rank)
        small = line is not None and tensor.nbytes <= LIMIT_BYTES
        return line if small and tensor.is_contiguous() else None

    def flush(self) -> None:
        """See `Outgoing.flush`, of all lines."""
        for line in self._lines.values():
            line.outgoing.flush()

    def closed(self, rank: int) -> bool:
        """Whether `rank` has closed its end."""
        return rank in self._lines and self._lines[rank].closed()

    def close(self) -> None:
        """Close this end of all lines; what has not left by then never will."""
        if self._pusher:
            self._pusher.close()
        for line in self._lines.values():
            line.close()
        self._lines.clear()
        self._pusher = None


class Line:
    """The connection to one rank; used by one thread."""

    def __init__(self, end: socket.socket, timeout: timedelta, pusher: Pusher) -> None:
        """Takes a connected socket; `timeout` is the longest wait for one message."""
        end.setblocking(False)
        self._something = select.poll()
        self._something.register(end, select.POLLIN)
        self.outgoing = Outgoing(end, timeout, pusher)
        self._end = end
        self._timeout = timeout
        self._posted: dict[int, deque[Arriving]] = defaultdict(deque)
        self._early: dict[int, deque[bytearray]] = defaultdict(deque)
        self._head = memoryview(bytearray(HEAD.size))
        self._broken = ""
        """Why nothing arrives any more."""

    def send(self, tensor: Tensor, tag: int) -> Sent:
        """See `Outgoing.send`."""
        return self.outgoing.send(tensor, tag)

    def receive(self, tensor: Tensor, tag: int) -> Arriving:
        """Post a receive into a contiguous `tensor` of at least a byte."""
        message = Arriving(tensor, self)
        early = self._early.get(tag)
        if early:
            message.take(early.popleft())
        else:
            self._posted[tag].append(message)
        return message

    def read(self) -> None:
        """Wait for the next message of any tag, and put it where it belongs.

        Raises:
            PeerLostError: if the other end is closed, or silent for too long.
        """
        if self._broken:
            raise PeerLostError(self._broken)
        try:
            self._fill(self._head)
            tag, size = HEAD.unpack(self._head)
            posted = self._posted.get(tag)
            if posted:
                message = posted.popleft()
                message.check(size)
                self._fill(message.place())
                message.done = True
            else:
                early = bytearray(size)
                self._fill(memoryview(early))
                self._early[tag].append(early)
        except PeerLostError as error:
            self._broken = str(error)
            raise
        except BaseException:
            self._broken = INTERRUPTED
            raise

    def _fill(self, place: memoryview) -> None:
        while place.nbytes:
            try:
                count = self._end.recv_into(place)
            except BlockingIOError:
                self._await()
                continue
            except OSError as error:
                raise PeerLostError(closed(error)) from error
            if not count:
                raise PeerLostError(closed())
            place = place[count:]

    def _await(self) -> None:
        """Until something is there; not by SO_RCVTIMEO, which every signal starts anew."""
        if not self._something.poll(min(self._timeout, _LONGEST) // timedelta(milliseconds=1)):
            raise PeerLostError(f"no message within {in_ms(self._timeout)}")

    def closed(self) -> bool:
        """Whether the other end is closed."""
        look = select.poll()
        look.register(self._end, select.POLLRDHUP)
        return bool(look.poll(0))

    def close(self) -> None:
        """Close this end, also where a forked process has it too."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()


class Arriving:
    """A message that is read when it is waited for."""

    __slots__ = ("_line", "_tensor", "done")

    def __init__(self, tensor: Tensor, line: Line) -> None:
        self._tensor, self._line = tensor, line
        self.done = False

    def place(self) -> memoryview:
        """Where the message belongs."""
        return bytes_of(self._tensor)

    def check(self, size: int) -> None:
        """Refuse a message of `size` bytes if another one was to come."""
        if size != self._tensor.nbytes:
            raise InternalError(
                f"message: got {size} bytes, need {self._tensor.nbytes}: the ranks do not run the"
                " same program. Report this plan."
            )

    def take(self, message: bytearray) -> None:
        """Put a message that has been read already in its place."""
        self.check(len(message))
        there = (ctypes.c_char * len(message)).from_buffer(message)
        ctypes.memmove(self._tensor.data_ptr(), there, len(message))
        self.done = True

    def wait(self) -> None:
        """See `Pending`."""
        while not self.done:
            self._line.read()
