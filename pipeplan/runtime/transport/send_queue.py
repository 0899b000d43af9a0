"""What leaves this rank over channels: eager, and pushed on while the rank computes.

`send` gives the kernel what it takes. The rest waits here, in order, and a thread pushes it on
whenever the kernel has room again. When its tensor is to go, a copy stays behind.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta

from torch import Tensor

from pipeplan.runtime.transport.base import PeerLostError

AHEAD_BYTES = 2**26
"""What may wait for room in the kernel, per channel, before its sender waits too.

Where sends block, a program that ends has few messages of a channel under way: those sent and not
freed, and those posted and not read, some per micro-batch in flight. With room for these nobody
waits who would not wait there, so whoever does is ahead of its reader, as in an evaluation. A
program that has posted receives of more than this on one channel, and reads another one first, may
wait here though it would not there; it ends with the timeout.
"""
INTERRUPTED = "an earlier message was interrupted"
_RETRY_MS = 1000
"""Kernels report room once three quarters of it are free, and take messages before."""
_ROOM_BYTES = 2**22
"""What we ask the kernel to hold per direction; it may grant less."""
_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
"""A reader that is gone is an error, not a SIGPIPE, which may end the process without a word."""
HEAD = struct.Struct("=QQ")
"""Tag and bytes of the message that follows."""


class SendQueue:
    """What one channel has not sent yet; used by the rank's thread and the send thread."""

    def __init__(self, end: socket.socket, timeout: timedelta, sender: SendThread) -> None:
        """Takes a connected socket; `timeout` is the longest wait for its reader."""
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM_BYTES)
        self.end = end
        self._timeout = timeout
        self._sender = sender
        self._unsent: deque[QueuedSend] = deque()
        self._bytes = 0
        self._broken = ""
        """Why nothing leaves any more."""

    @property
    def waiting_bytes(self) -> int:
        """Of all messages that have not left as a whole."""
        return self._bytes

    def send(self, tensor: Tensor, tag: int) -> QueuedSend:
        """Hand over a contiguous `tensor` of at least a byte; it must live until `wait`.

        Raises:
            PeerLostError: if the other end is closed.
        """
        message = QueuedSend(tensor, tag, self)
        try:
            with self._sender.lock:
                self._check()
                self._unsent.append(message)
                self._bytes += message.size
                full = self.push() if len(self._unsent) == 1 else True
                self._check()
            if full:
                self._sender.wake()
        except PeerLostError:
            raise
        except BaseException:  # a signal's handler: how much has left is not known
            with self._sender.lock:
                self._break(INTERRUPTED)
            raise
        return message

    def push(self) -> bool:
        """Give the kernel what it takes; whether anything is left. The caller has the lock."""
        try:
            while self._unsent:
                self._unsent[0].push()
                self._bytes -= self._unsent.popleft().size
        except BlockingIOError:
            return True
        except OSError as error:
            self._break(closed(error))
        return False

    def settle(self, message: QueuedSend) -> None:
        """Let go of the tensor of a message, although the kernel may have no room for it yet.

        Raises:
            PeerLostError: if the other end is closed, or too far behind for too long.
        """
        with self._sender.lock:
            self._await(lambda: message.left is None or self._bytes <= AHEAD_BYTES)
            if message.left is not None:
                self._check()
                message.keep()

    def flush(self) -> None:
        """Return once the kernel has everything: from then on this process may end.

        Raises:
            PeerLostError: if the other end is closed, or reads nothing for too long.
        """
        if self._unsent or self._broken:
            with self._sender.lock:
                self._await(lambda: not self._unsent)
                self._check()

    def _await(self, done: Callable[[], bool]) -> None:
        """Until `done`, for as long as the reader goes on. The caller has the lock."""
        while not (self._broken or done()):
            before = self._bytes

            def moved(before: int = before) -> bool:
                return bool(self._broken) or self._bytes < before

            if not self._sender.moved.wait_for(moved, self._timeout.total_seconds()):
                self._break(f"no message read within {in_ms(self._timeout)}")

    def _break(self, why: str) -> None:
        """Nothing leaves any more. The caller has the lock."""
        self._broken = why
        self._unsent.clear()
        self._bytes = 0

    def _check(self) -> None:
        if self._broken:
            raise PeerLostError(self._broken)


class QueuedSend:
    """A message that the kernel takes, in pieces if need be."""

    __slots__ = ("_channel", "_head", "_tensor", "left", "size")

    def __init__(self, tensor: Tensor, tag: int, channel: SendQueue) -> None:
        self._channel = channel
        self._tensor: Tensor | None = tensor
        self.left: memoryview | None = raw_bytes(tensor)
        """What has not left yet."""
        self.size = tensor.nbytes
        self._head = HEAD.pack(tag, self.size)

    def push(self) -> None:
        """Send all of it.

        Raises:
            BlockingIOError: if the kernel has no room for what is left.
        """
        assert self.left is not None
        while self.left.nbytes:
            parts = (self._head, self.left) if self._head else (self.left,)
            count = self._channel.end.sendmsg(parts, (), _FLAGS)
            of_head = min(count, len(self._head))
            self._head = self._head[of_head:]
            self.left = self.left[count - of_head :]
        self.left = self._tensor = None

    def keep(self) -> None:
        """Go on from a copy."""
        if self._tensor is not None and self.left is not None:
            self.left, self._tensor = memoryview(bytes(self.left)), None

    def wait(self) -> None:
        """See `Pending`."""
        if self.left is not None:
            self._channel.settle(self)


class SendThread:
    """The thread of a rank that pushes on what the kernel had no room for."""

    def __init__(self) -> None:
        """Starts without channels.

        Raises:
            OSError: if no file can be opened.
            RuntimeError: if no thread can be started.
        """
        self.lock = threading.Lock()
        """Guards what has not left, of all channels."""
        self.moved = threading.Condition(self.lock)
        """Notified when some of it has, or never will."""
        self._wake = os.eventfd(0)
        self._over = False
        self._channels: tuple[SendQueue, ...] = ()
        self._thread = threading.Thread(target=self._run, name="send-thread", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            os.close(self._wake)
            raise

    def push_for(self, channels: tuple[SendQueue, ...]) -> None:
        """Push on what these have waiting, whenever woken."""
        with self.lock:
            self._channels = channels

    def wake(self) -> None:
        """Say that a channel has something to push."""
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
                waiting = [channel for channel in self._channels if channel.push()]
                self.moved.notify_all()
            for channel in waiting:
                look.register(channel.end, select.POLLOUT)
            ready = look.poll(_RETRY_MS if waiting else None)
            if any(file == self._wake for file, _ in ready):
                os.eventfd_read(self._wake)


def raw_bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of any type, without an operation of torch."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


def in_ms(time: timedelta) -> str:
    """A time for messages."""
    return f"{time // timedelta(milliseconds=1)} ms"


def closed(error: OSError | None = None) -> str:
    """What is said of an end that is gone."""
    why = f" ({error.strerror})" if error else ""
    return f"connection closed by the other end{why}"
