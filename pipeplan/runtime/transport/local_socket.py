"""Small messages between ranks of one machine: over sockets that the waiting thread reads itself.

A message over gloo wakes gloo's thread, which wakes the thread that waits: two idle cores, one
after the other. A channel, one unix socket per pair of ranks, wakes the waiting thread and nobody
else. It carries what is small enough for the kernel to hold (`LIMIT_BYTES`) and is eager: `send`
hands the bytes over whether or not anybody waits for them, so a program that is safe where sends
block ((O6) of docs/reference/model.md) is safe here. Each message says its tag and size first;
what arrives before its receive is posted is kept until then, so messages of different tags never
wait for each other and those of one tag keep their order.

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
from pipeplan.runtime.transport.base import PeerLostError
from pipeplan.runtime.transport.send_queue import (
    HEAD,
    INTERRUPTED,
    QueuedSend,
    SendQueue,
    SendThread,
    closed,
    in_ms,
    raw_bytes,
)

LIMIT_BYTES = 2**17
"""The largest message of a channel: kernels hold a few of these at least (416 KiB, unless told
otherwise), and one that is read late costs its reader some 10 us. Gloo reads while we compute."""

_LONGEST = timedelta(days=24)
"""That `poll` can wait (2^31 ms)."""


class SocketChannels:
    """This rank's channels, by rank in the group."""

    def __init__(
        self,
        ends: Mapping[int, socket.socket] | None = None,
        timeout: timedelta = timedelta(),
        sender: SendThread | None = None,
    ) -> None:
        """Takes connected stream sockets.

        Args:
            ends: by rank; none: every message takes the other road.
            timeout: longest wait for one message.
            sender: of these channels and no others; None: one is started if it is needed.
        """
        self._sender = sender or (SendThread() if ends else None)
        self._channels: dict[int, SocketChannel] = {}
        if self._sender and ends:
            for rank, end in ends.items():
                self._channels[rank] = SocketChannel(end, timeout, self._sender)
            self._sender.push_for(tuple(channel.queue for channel in self._channels.values()))
        else:
            self.close()

    def carrying(self, tensor: Tensor, rank: int) -> SocketChannel | None:
        """The channel that takes a message like `tensor` to or from `rank`, if one does."""
        channel = self._channels.get(rank)
        small = channel is not None and tensor.nbytes <= LIMIT_BYTES
        return channel if small and tensor.is_contiguous() else None

    def flush(self) -> None:
        """See `SendQueue.flush`, of all channels."""
        for channel in self._channels.values():
            channel.queue.flush()

    def closed(self, rank: int) -> bool:
        """Whether `rank` has closed its end."""
        return rank in self._channels and self._channels[rank].closed()

    def close(self) -> None:
        """Close this end of all channels; what has not left by then never will."""
        if self._sender:
            self._sender.close()
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        self._sender = None


class SocketChannel:
    """The connection to one rank; used by one thread."""

    def __init__(self, end: socket.socket, timeout: timedelta, sender: SendThread) -> None:
        """Takes a connected socket; `timeout` is the longest wait for one message."""
        end.setblocking(False)
        self._something = select.poll()
        self._something.register(end, select.POLLIN)
        self.queue = SendQueue(end, timeout, sender)
        self._end = end
        self._timeout = timeout
        self._posted: dict[int, deque[PostedReceive]] = defaultdict(deque)
        self._early: dict[int, deque[bytearray]] = defaultdict(deque)
        self._head = memoryview(bytearray(HEAD.size))
        self._broken = ""
        """Why nothing arrives any more."""

    def send(self, tensor: Tensor, tag: int) -> QueuedSend:
        """See `SendQueue.send`."""
        return self.queue.send(tensor, tag)

    def receive(self, tensor: Tensor, tag: int) -> PostedReceive:
        """Post a receive into a contiguous `tensor` of at least a byte."""
        message = PostedReceive(tensor, self)
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


class PostedReceive:
    """A message that is read when it is waited for."""

    __slots__ = ("_channel", "_tensor", "done")

    def __init__(self, tensor: Tensor, channel: SocketChannel) -> None:
        self._tensor, self._channel = tensor, channel
        self.done = False

    def place(self) -> memoryview:
        """Where the message belongs."""
        return raw_bytes(self._tensor)

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
            self._channel.read()
