"""Ends the connections of a gloo group at once, whoever still waits on them or holds the group.

A group closes its connections when it is destroyed, which waits for collectives under way (a vote
of which others may never hear) and happens only once nothing refers to it (a traceback does, as
does a message posted and not waited for). After a failure the other ranks would wait for the
timeout. Shut down, a connection tells both ends, and everything that waits on it fails.

gloo does not say which sockets are its own. They are those that appeared while the group was made
and whose two ends are told by two ranks, each by one: nobody else's connection is touched.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup

_FOLDER = "/dev/fd"
_End = tuple[str, int]
"""Address and port."""


@dataclass(frozen=True, slots=True)
class Connection:
    """A TCP connection of this process."""

    file: int
    inode: int
    """Of the socket: the file's number may be given to another one later."""
    own: _End
    peer: _End

    def sever(self) -> None:
        """Tell both ends that there will be nothing more; whoever uses it closes it."""
        with suppress(OSError):
            if os.fstat(self.file).st_ino == self.inode:
                with _same(self.file) as connection:
                    connection.shutdown(socket.SHUT_RDWR)


def connections() -> frozenset[Connection]:
    """All that this process has; none where the system does not list its files."""
    try:
        files = [int(name) for name in os.listdir(_FOLDER)]
    except OSError:
        return frozenset()
    return frozenset(found for file in files for found in _connection(file))


def of_group(group: ProcessGroup, before: Collection[Connection]) -> tuple[Connection, ...]:
    """Those between the ranks of `group`, all of which call it.

    Args:
        group: just made.
        before: what there was before.
    """
    new = connections() - set(before)
    told: list[Any] = [None] * group.size()
    dist.all_gather_object(told, [(each.own, each.peer) for each in new], group)
    ends = {pair for rank, pairs in enumerate(told) if rank != group.rank() for pair in pairs}
    return tuple(each for each in new if (each.peer, each.own) in ends)


def _connection(file: int) -> Iterator[Connection]:
    with suppress(OSError, ValueError):  # no socket, or closed meanwhile, or not connected
        found = os.fstat(file)
        if not stat.S_ISSOCK(found.st_mode):
            return
        with _same(file) as connection:
            tcp = connection.family in (socket.AF_INET, socket.AF_INET6)
            if tcp and connection.type == socket.SOCK_STREAM:
                own, peer = _end(connection.getsockname()), _end(connection.getpeername())
                yield Connection(file, found.st_ino, own, peer)


@contextmanager
def _same(file: int) -> Iterator[socket.socket]:
    """The socket behind `file`, by another number."""
    copy = os.dup(file)
    try:
        connection = socket.socket(fileno=copy)
    except BaseException:
        os.close(copy)
        raise
    with connection:
        yield connection


def _end(name: tuple[Any, ...]) -> _End:
    """Without what one machine alone means: the scope of a link-local address."""
    return str(name[0]).partition("%")[0], int(name[1])
