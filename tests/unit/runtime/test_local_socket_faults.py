"""Lines when something goes wrong: early ends, slow readers, signals, refused sockets."""

from __future__ import annotations

import errno
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed.distributed_c10d import ProcessGroup, Store

from pipeplan.errors import RankError
from pipeplan.runtime.transport import local_rendezvous, send_queue
from pipeplan.runtime.transport.base import PeerLostError
from pipeplan.runtime.transport.local_socket import LIMIT_BYTES, SocketChannel, SocketChannels
from pipeplan.runtime.transport.nccl import NcclTransport
from pipeplan.runtime.transport.pair_communicator import CommunicatorSpec
from pipeplan.runtime.transport.rank_grid import RankGrid
from tests.socket_ends import ends, last_words

pytestmark = pytest.mark.skipif(
    not Path("/proc/sys/kernel/random/boot_id").exists(), reason="socket channels need Linux"
)


class _StopError(Exception):
    pass


def filled(channel: SocketChannel, messages: int = 100) -> None:
    """Sends more than the kernel holds."""
    for _ in range(messages):
        channel.send(torch.zeros(LIMIT_BYTES, dtype=torch.uint8), 0).wait()
    assert channel.queue.waiting_bytes, "the kernel must have refused some, or this shows nothing"


def read(channel: SocketChannel, messages: int, pause_s: float) -> None:
    """Receives what `filled` sends, slowly."""
    buffer = torch.zeros(LIMIT_BYTES, dtype=torch.uint8)
    for _ in range(messages):
        time.sleep(pause_s)
        channel.receive(buffer, 0).wait()


@contextmanager
def handled(number: signal.Signals, handler: Any) -> Iterator[None]:
    """While `handler` takes the signal."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def test_flush_returns_once_all_has_left() -> None:
    """What was flushed needs nobody here any more: a process may end after it."""
    with ends() as (here, there):
        here.queue.flush()
        filled(here)
        reader = threading.Thread(target=read, args=(there, 100, 0.001))
        reader.start()
        here.queue.flush()
        assert here.queue.waiting_bytes == 0
        here.close()
        reader.join()
        assert there.closed()


def test_flush_misses_a_reader_that_stops() -> None:
    """It gives up after the timeout, and says so from then on."""
    with ends(patience_s=0.3) as (here, _):
        filled(here)
        for _ in range(2):
            with pytest.raises(PeerLostError, match="no message read within 300 ms"):
                here.queue.flush()


def test_a_slow_reader_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes for everything, while each message is read within the timeout."""
    monkeypatch.setattr(send_queue, "_RETRY_MS", 50)
    with ends(patience_s=1) as (here, there):
        filled(here)
        reader = threading.Thread(target=read, args=(there, 100, 0.05))
        begin = time.monotonic()
        reader.start()
        here.queue.flush()
        assert time.monotonic() - begin > 1.2, "it must take longer than the timeout"
        reader.join()


def test_a_dead_reader_sends_no_signal() -> None:
    """Where SIGPIPE ends the process, it would end without a word."""
    noted: list[int] = []
    with (
        handled(signal.SIGPIPE, lambda number, _: noted.append(number)),
        ends() as (here, there),
    ):
        there.close()
        with pytest.raises(PeerLostError, match="connection closed"):
            here.send(torch.zeros(4), 0)
        time.sleep(0.01)
    assert noted == []


def test_signals_do_not_stretch_the_timeout() -> None:
    """A program with a timer misses a silent peer as soon as any other."""
    begin = time.monotonic()

    def handler(_: int, __: FrameType | None) -> None:
        if time.monotonic() - begin > 60:
            raise _StopError

    with handled(signal.SIGALRM, handler), ends(patience_s=0.5) as (_, there):
        signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
        try:
            with pytest.raises(PeerLostError, match="no message within 500 ms"):
                there.receive(torch.zeros(1), 0).wait()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    assert time.monotonic() - begin > 0.45


class _Interrupted:
    """A socket that a signal's handler ends the call of, after it has sent."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        return self._end.fileno()

    def sendmsg(self, *words: Any) -> int:
        self._end.sendmsg(*words)
        raise _StopError


def test_an_interrupted_send_is_not_repeated() -> None:
    """It is not known how much has left, so nothing does from then on: never twice."""
    with ends() as (here, there):
        end = here.queue.end
        here.queue.end = cast("socket.socket", _Interrupted(end))
        with pytest.raises(_StopError):
            here.send(torch.ones(4), 1)
        here.queue.end = end
        here.queue._sender.wake()
        with pytest.raises(PeerLostError, match="an earlier message was interrupted"):
            here.send(torch.ones(4), 1)
        with pytest.raises(PeerLostError, match="an earlier message was interrupted"):
            here.queue.flush()
        buffer = torch.zeros(4)
        there.receive(buffer, 1).wait()
        assert bool(buffer.all())
        time.sleep(0.1)
        here.close()
        with pytest.raises(PeerLostError, match="connection closed"):
            there.receive(buffer, 1).wait()


def test_closed_although_another_process_has_the_end() -> None:
    """As a worker does that was forked; what has been sent still arrives."""
    with ends() as (here, there):
        held = here.queue.end.dup()
        last_words(here, there)
        held.close()


def test_no_sockets_no_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that gets none, or no more files, has no channels; it does not fail."""
    listener, address = local_rendezvous._listen("machine", 2)
    assert listener is not None
    assert address is not None

    def refuse(*_: object) -> socket.socket:
        raise OSError(errno.EMFILE, "Too many open files")

    with listener, monkeypatch.context() as patch:
        patch.setattr(local_rendezvous.socket, "socket", refuse)
        assert local_rendezvous._listen("machine", 2) == (None, None)
        assert local_rendezvous._call(address, replace(address, secret=bytes(16)), 1) is None


class Nobody:
    """A process group that has a store and nothing else."""

    def get_group_store(self) -> HashStore:
        return HashStore()


@contextmanager
def two_ranks() -> Iterator[RankGrid]:
    """One of two with a line; leaves no thread."""
    threads = threading.active_count()
    pair = socket.socketpair()
    channels = SocketChannels({1: pair[0]}, timedelta(seconds=1))
    group, store = cast("ProcessGroup", Nobody()), cast("Store", None)
    yield RankGrid(
        group, store, timedelta(seconds=1), ((0, 1),), 0, owned=False, channels=channels
    )
    assert threading.active_count() == threads
    pair[1].close()


def fail(*_: object, **__: object) -> None:
    """What torch.distributed does when a peer is gone."""
    raise RuntimeError("lost")


def test_leaving_fails_and_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever cannot leave together with the others leaves no thread behind."""
    monkeypatch.setattr(dist, "barrier", fail)
    with two_ranks() as ranks, pytest.raises(RankError, match=r"another rank was gone.*: lost"):
        ranks.leave()


def test_channels_fail_and_close() -> None:
    """Nor does whoever gets its channels and then no communicators."""
    channel = CommunicatorSpec(0, 1, (0,))
    with two_ranks() as ranks, pytest.raises(RuntimeError, match="lost"):
        NcclTransport(ranks, [channel], torch.device("cpu"), make=fail)
