"""Small messages between ranks of one machine: over sockets that the waiting thread reads itself.

A message over gloo wakes gloo's thread, which wakes the thread that waits: two idle cores, one
after the other. A line, one unix socket per pair of ranks, wakes the waiting thread and nobody
else. It carries what is small enough for the kernel to hold (`LIMIT_BYTES`) and is eager: `send`
hands the bytes over whether or not anybody waits for them, so a sender never waits for a receiver,
and a program that is safe where sends block ((O6) of docs/model.md) is safe here. Each message
says its tag and size first; what arrives before its receive is posted is kept until then, so
messages of different tags never wait for each other and those of one tag keep their order.

Larger messages travel over gloo (rendezvous). Both ends choose the road by size alone.
Source: the eager and rendezvous protocols of MPI implementations.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Mapping
from datetime import timedelta
from errno import EAGAIN

from torch import Tensor

from pipeplan.errors import InternalError
from pipeplan.runtime.peerloss import PeerLostError

LIMIT_BYTES = 2**17
"""The largest message of a line; gloo is as fast beyond (docs/runtime.md, Messages)."""
_ROOM_BYTES = 2**22
"""What we ask the kernel to hold per direction; it may grant less."""
_HEAD = struct.Struct("=QQ")
"""Tag and bytes of the message that follows."""


class Lines:
    """This rank's lines, by rank in the group."""

    def __init__(
        self, ends: Mapping[int, socket.socket] | None = None, timeout: timedelta = timedelta()
    ) -> None:
        """Takes connected stream sockets.

        Args:
            ends: by rank; none: every message takes the other road.
            timeout: longest wait for one message.
        """
        self._pusher = _Pusher() if ends else None
        self._lines: dict[int, Line] = {}
        if self._pusher:
            for rank, end in (ends or {}).items():
                self._lines[rank] = Line(end, timeout, self._pusher)
            self._pusher.start(tuple(self._lines.values()))

    def carrying(self, tensor: Tensor, rank: int) -> Line | None:
        """The line that takes a message like `tensor` to or from `rank`, if one does."""
        line = self._lines.get(rank)
        small = line is not None and tensor.nbytes <= LIMIT_BYTES
        return line if small and tensor.is_contiguous() else None

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
    """The connection to one rank; one thread uses it, the pusher helps with sending."""

    def __init__(self, end: socket.socket, timeout: timedelta, pusher: _Pusher) -> None:
        end.setblocking(True)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM_BYTES)
        seconds, rest = divmod(timeout, timedelta(seconds=1))
        limit = struct.pack("@ll", seconds, rest.microseconds)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self.end = end
        self._timeout = timeout
        self._pusher = pusher
        self._unsent: deque[_Sent] = deque()
        self._posted: dict[int, deque[_Arriving]] = defaultdict(deque)
        self._early: dict[int, deque[bytearray]] = defaultdict(deque)
        self._head = memoryview(bytearray(_HEAD.size))
        self.broken = ""
        """Why nothing travels any more."""

    def send(self, tensor: Tensor, tag: int) -> _Sent:
        """Hand over a contiguous `tensor` of at least a byte; it must live until `wait`."""
        message = _Sent(tensor, tag, self)
        with self._pusher.lock:
            self.check()
            self._unsent.append(message)
            if len(self._unsent) == 1:
                self.push()
            self.check()
            full = bool(self._unsent)
        if full:
            self._pusher.wake()
        return message

    def push(self) -> bool:
        """Give the kernel what it takes; whether anything is left. The caller has the lock."""
        try:
            while self._unsent and self._unsent[0].push():
                self._unsent.popleft()
        except BlockingIOError:
            return True
        except OSError as error:
            self.broken = _closed(error)
        if self.broken:
            self._unsent.clear()
        return bool(self._unsent)

    def receive(self, tensor: Tensor, tag: int) -> _Arriving:
        """Post a receive into a contiguous `tensor` of at least a byte."""
        message = _Arriving(tensor, self)
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
        self.check()
        try:
            self._fill(self._head)
            tag, size = _HEAD.unpack(self._head)
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
            self.broken = str(error)
            raise
        except BaseException:
            self.broken = "an earlier message was interrupted"
            raise

    def _fill(self, place: memoryview) -> None:
        while place.nbytes:
            try:
                count = self.end.recv_into(place, 0, socket.MSG_WAITALL)
            except OSError as error:
                if error.errno == EAGAIN:
                    milliseconds = self._timeout // timedelta(milliseconds=1)
                    raise PeerLostError(f"no message within {milliseconds} ms") from error
                raise PeerLostError(_closed(error)) from error
            if not count:
                raise PeerLostError(_closed())
            place = place[count:]

    def check(self) -> None:
        """Raise `PeerLostError` if nothing travels any more."""
        if self.broken:
            raise PeerLostError(self.broken)

    def settle(self, message: _Sent) -> None:
        """Let go of the tensor of a message, although the kernel may have no room for it yet."""
        with self._pusher.lock:
            if message.left:
                self.check()
                message.keep()

    def closed(self) -> bool:
        """Whether the other end is closed."""
        look = select.poll()
        look.register(self.end, select.POLLRDHUP)
        return bool(look.poll(0))

    def close(self) -> None:
        """Close this end."""
        self.broken = "this rank has left"
        self.end.close()


class _Sent:
    """A message that the kernel takes, in pieces if need be."""

    __slots__ = ("_head", "_line", "_tensor", "left")

    def __init__(self, tensor: Tensor, tag: int, line: Line) -> None:
        self._line = line
        self._tensor: Tensor | None = tensor
        self.left: memoryview | None = _bytes_of(tensor)
        """What has not left yet."""
        self._head = _HEAD.pack(tag, tensor.nbytes)

    def push(self) -> bool:
        """Send what the kernel takes; whether all of it has left."""
        assert self.left is not None
        while self.left.nbytes:
            parts = (self._head, self.left) if self._head else (self.left,)
            count = self._line.end.sendmsg(parts, (), socket.MSG_DONTWAIT)
            of_head = min(count, len(self._head))
            self._head = self._head[of_head:]
            self.left = self.left[count - of_head :]
        self.left = self._tensor = None
        return True

    def keep(self) -> None:
        """Go on from a copy."""
        if self._tensor is not None and self.left is not None:
            self.left, self._tensor = memoryview(bytes(self.left)), None

    def wait(self) -> None:
        """See `Pending`; never blocks."""
        if self.left is not None:
            self._line.settle(self)


class _Arriving:
    """A message that is read when it is waited for."""

    __slots__ = ("_line", "_tensor", "done")

    def __init__(self, tensor: Tensor, line: Line) -> None:
        self._tensor, self._line = tensor, line
        self.done = False

    def place(self) -> memoryview:
        """Where the message belongs."""
        return _bytes_of(self._tensor)

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
        ctypes.memmove(self._tensor.data_ptr(), bytes(message), len(message))
        self.done = True

    def wait(self) -> None:
        """See `Pending`."""
        while not self.done:
            self._line.read()


class _Pusher:
    """A thread that pushes on what the kernel had no room for, while the rank computes."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """Guards what has not left, of all lines."""
        self._wake = os.eventfd(0)
        self._over = False
        self._lines: tuple[Line, ...] = ()
        self._thread = threading.Thread(target=self._run, name="pusher", daemon=True)

    def start(self, lines: tuple[Line, ...]) -> None:
        """Begin to push for `lines`."""
        self._lines = lines
        self._thread.start()

    def wake(self) -> None:
        """Say that a line has something to push."""
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Stop pushing."""
        self._over = True
        self.wake()
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        while not self._over:
            look = select.poll()
            look.register(self._wake, select.POLLIN)
            with self.lock:
                for line in self._lines:
                    if line.push():
                        look.register(line.end, select.POLLOUT)
            if any(ready == self._wake for ready, _ in look.poll()):
                os.eventfd_read(self._wake)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of any type, without an operation of torch."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


def _closed(error: OSError | None = None) -> str:
    why = f" ({error.strerror})" if error else ""
    return f"connection closed by the other end{why}"
