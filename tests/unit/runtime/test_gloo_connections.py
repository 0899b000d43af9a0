"""Connections are ended for both sides, and none but those that were meant."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from pipeplan.runtime.transport import gloo_connections

pytestmark = pytest.mark.skipif(not Path("/dev/fd").is_dir(), reason="no list of open files")


def connected() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return one, other


def found(end: socket.socket) -> gloo_connections.Connection:
    """What is known of it."""
    return next(each for each in gloo_connections.connections() if each.file == end.fileno())


def test_both_ends_hear_of_it() -> None:
    """Whoever reads, here or there, gets an end; the files stay whose they were."""
    before = gloo_connections.connections()
    one, other = connected()
    with one, other:
        made = gloo_connections.connections() - before
        assert {(each.own, each.peer) for each in made} == {
            (one.getsockname(), other.getsockname()),
            (other.getsockname(), one.getsockname()),
        }
        found(one).sever()
        assert one.recv(1) == other.recv(1) == b""
        assert one.fileno() >= 0
    assert not made & gloo_connections.connections()


def test_a_file_that_is_another_one_now() -> None:
    """A number that was given away since is left alone, as is one that is closed."""
    one, other = connected()
    with one, other:
        known = found(one)
        third, fourth = connected()
        with third, fourth:
            os.dup2(third.fileno(), one.fileno())
            known.sever()
            third.sendall(b"x")
            assert fourth.recv(1) == b"x"
    known.sever()


def test_what_is_no_connection() -> None:
    """Listening, unix and unconnected sockets, pipes and files are none, and stay open."""
    ends = os.pipe()
    one, other = socket.socketpair()
    with one, other, socket.socket() as alone, socket.create_server(("127.0.0.1", 0)) as server:
        files = {*ends, one.fileno(), other.fileno(), alone.fileno(), server.fileno()}
        assert not files & {each.file for each in gloo_connections.connections()}
        one.sendall(b"x")
        assert other.recv(1) == b"x"
    count = len(os.listdir("/dev/fd"))
    gloo_connections.connections()
    assert len(os.listdir("/dev/fd")) == count
    for end in ends:
        os.close(end)
