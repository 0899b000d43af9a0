"""Both ends of a line, in this process."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch

from pipeplan.runtime.transport.local_socket import SocketChannel, SocketChannels


@contextmanager
def ends(patience_s: float = 20) -> Iterator[tuple[SocketChannel, SocketChannel]]:
    """Both ends of a line: what is sent here, arrives there."""
    pair = socket.socketpair()
    both = [SocketChannels({0: end}, timedelta(seconds=patience_s)) for end in pair]
    small = torch.zeros(1)
    here, there = (each.carrying(small, 0) for each in both)
    assert here is not None
    assert there is not None
    try:
        yield here, there
    finally:
        for each in both:
            each.close()


def last_words(here: SocketChannel, there: SocketChannel) -> None:
    """Sends from `here` and closes it: what has been sent still arrives there."""
    assert not there.closed()
    here.send(torch.ones(4), 1)
    here.close()
    assert there.closed()
    buffer = torch.zeros(4)
    there.receive(buffer, 1).wait()
    assert bool(buffer.all())
