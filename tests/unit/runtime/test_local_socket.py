"""Lines between two ranks of one machine: order, room, losses. Both ends are in this process."""

from __future__ import annotations

import os
import random
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from pipeplan.errors import InternalError
from pipeplan.livebytes import LiveBytes
from pipeplan.runtime.transport import local_rendezvous, send_queue
from pipeplan.runtime.transport.base import PeerLostError
from pipeplan.runtime.transport.local_socket import LIMIT_BYTES, SocketChannels
from tests.socket_ends import ends, last_words

pytestmark = pytest.mark.skipif(
    not Path("/proc/sys/kernel/random/boot_id").exists(), reason="socket channels need Linux"
)


def test_order_within_a_tag_and_none_between() -> None:
    """Whatever the order of posts and waits: the n-th receive of a tag gets its n-th message."""
    chance = random.Random(7)
    for _ in range(20):
        with ends() as (here, there):
            tags = [chance.choice([0, 1, 2**20, 2**32 + 5]) for _ in range(40)]
            sent = [here.send(torch.tensor([number]), tag) for number, tag in enumerate(tags)]
            kept = chance.sample(range(40), 40)
            buffers = {n: torch.zeros(1, dtype=torch.int64) for n in range(40)}
            waits = {}
            for number in sorted(range(40), key=lambda n: (tags[n], n)):
                waits[number] = there.receive(buffers[number], tags[number])
                if chance.random() < 0.3:
                    waits[number].wait()
            for number in kept:
                waits[number].wait()
                assert buffers[number].item() == number
            for message in sent:
                message.wait()


def test_more_than_the_kernel_holds() -> None:
    """100 of the largest messages that nobody reads: no send waits, tensors may change after."""
    with ends() as (here, there):
        tensor = torch.zeros(LIMIT_BYTES // 8, dtype=torch.int64)
        for number in range(100):
            tensor.fill_(number)
            here.send(tensor, number % 3).wait()
        assert here.queue.waiting_bytes, "the kernel must have refused some, or this shows nothing"
        for number in sorted(range(100), key=lambda n: (n % 3, n)):
            buffer = torch.empty_like(tensor)
            there.receive(buffer, number % 3).wait()
            assert bool((buffer == number).all())
        assert not here.queue.waiting_bytes


def test_a_sender_far_ahead_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what may wait for room a sender goes on only as its reader does: bounded memory."""
    monkeypatch.setattr(send_queue, "AHEAD_BYTES", 4 * LIMIT_BYTES)
    sent, behind = [], []
    with ends() as (here, there):

        def send() -> None:
            for number in range(200):
                message = here.send(torch.full((LIMIT_BYTES,), number, dtype=torch.uint8), 0)
                message.wait()
                sent.append(number)
                behind.append(here.queue.waiting_bytes)

        sender = threading.Thread(target=send)
        sender.start()
        time.sleep(0.5)
        assert len(sent) < 150, "nobody has read anything"
        buffer = torch.zeros(LIMIT_BYTES, dtype=torch.uint8)
        for number in range(200):
            there.receive(buffer, 0).wait()
            assert bool((buffer == number).all())
        sender.join()
        assert max(behind) == 4 * LIMIT_BYTES
        assert here.queue.waiting_bytes == 0


def test_a_reader_that_stops_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sender that waits for it gives up after the timeout."""
    monkeypatch.setattr(send_queue, "AHEAD_BYTES", 0)
    with ends(patience_s=0.3) as (here, _):
        tensor = torch.zeros(LIMIT_BYTES, dtype=torch.uint8)
        sent = [here.send(tensor, 0) for _ in range(200)]
        with pytest.raises(PeerLostError, match="no message read within 300 ms"):
            sent[-1].wait()
        with pytest.raises(PeerLostError, match="no message read within 300 ms"):
            here.send(torch.zeros(1), 0)


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
        *(torch.int8, torch.int64, torch.bool, torch.complex64),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (3,), (2, 5, 7)], ids=str)
def test_every_dtype_and_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The bytes that were sent arrive, scalars included, also with a gradient wanted."""
    with ends() as (here, there):
        tensor = torch.randint(0, 2, shape).to(dtype)
        buffer = torch.empty(shape, dtype=dtype)
        tensor.requires_grad_(dtype in (torch.float32, torch.bfloat16))
        here.send(tensor, 1).wait()
        there.receive(buffer, 1).wait()
        assert torch.equal(buffer.to(torch.complex64), tensor.detach().to(torch.complex64))


def test_what_a_line_carries() -> None:
    """Both ends choose by size: up to the limit, and nothing that has holes."""
    pair = socket.socketpair()
    made = SocketChannels({3: pair[0]}, timedelta(seconds=1))
    fits = torch.zeros(LIMIT_BYTES, dtype=torch.uint8)
    assert made.carrying(fits, 3) is not None
    assert made.carrying(torch.zeros(LIMIT_BYTES + 1, dtype=torch.uint8), 3) is None
    assert made.carrying(fits, 2) is None
    assert made.carrying(torch.zeros(4, 4).T, 3) is None
    made.close()
    assert made.carrying(fits, 3) is None
    pair[1].close()


def test_a_dead_peer_is_missed_at_once() -> None:
    """What it sent before still arrives; then waits and sends say that it is gone.

    Its timeout is longer than that of the test.
    """
    with ends(patience_s=3600) as (here, there):
        last_words(here, there)
        buffer = torch.zeros(4)
        with pytest.raises(PeerLostError, match="connection closed by the other end"):
            there.receive(buffer, 1).wait()
        with pytest.raises(PeerLostError, match="connection closed by the other end"):
            there.send(buffer, 1)


def test_a_peer_that_dies_with_unread_messages() -> None:
    """What the kernel had no room for is given up, and its sender told."""
    with ends() as (here, there):
        tensor = torch.zeros(LIMIT_BYTES, dtype=torch.uint8)
        sent = [here.send(tensor, 0) for _ in range(100)]
        there.close()
        deadline = time.monotonic() + 10
        while here.queue.waiting_bytes and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(PeerLostError, match="connection closed"):
            sent[-1].wait()
        sent[0].wait()


def test_a_silent_peer_is_missed_after_the_timeout() -> None:
    """Not before, and from then on at once."""
    with ends(patience_s=0.3) as (_, there):
        begin = time.monotonic()
        message = there.receive(torch.zeros(4), 1)
        with pytest.raises(PeerLostError, match="no message within 300 ms"):
            message.wait()
        assert time.monotonic() - begin > 0.25
        with pytest.raises(PeerLostError, match="no message within 300 ms"):
            message.wait()


def test_another_size_than_posted() -> None:
    """Ranks that run different programs are told so, whichever end is first."""
    with ends() as (here, there):
        here.send(torch.zeros(4), 1)
        here.send(torch.zeros(4), 2)
        with pytest.raises(InternalError, match="got 16 bytes, need 20"):
            there.receive(torch.zeros(5), 1).wait()
        with pytest.raises(PeerLostError, match="interrupted"):
            there.receive(torch.zeros(4), 2).wait()
    with ends() as (here, there):
        here.send(torch.zeros(4), 1)
        here.send(torch.zeros(4), 2)
        there.receive(torch.zeros(4), 2).wait()
        with pytest.raises(InternalError, match="got 16 bytes, need 20"):
            there.receive(torch.zeros(5), 1)


class _StopError(Exception):
    pass


@pytest.mark.parametrize("stops", [False, True])
def test_signals_while_waiting(stops: bool) -> None:
    """A handler that takes note lets the wait go on; one that raises ends it, and the line."""
    noted = []

    def handler(number: int, _: object) -> None:
        noted.append(number)
        if stops:
            raise _StopError

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with ends() as (here, there):
            buffer = torch.zeros(4)
            steps = (
                lambda: os.kill(os.getpid(), signal.SIGUSR1),
                lambda: here.send(torch.ones(4), 1),
            )
            timers = [threading.Timer(0.1 * (1 + n), step) for n, step in enumerate(steps)]
            for timer in timers:
                timer.start()
            if stops:
                with pytest.raises(_StopError):
                    there.receive(buffer, 1).wait()
                with pytest.raises(PeerLostError, match="interrupted"):
                    there.receive(buffer, 1).wait()
            else:
                there.receive(buffer, 1).wait()
                assert bool(buffer.all())
            for timer in timers:
                timer.join()
        assert noted == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_moving_counts_no_live_bytes() -> None:
    """Messages are moved without operations of torch: a meter sees nothing of it."""
    with ends() as (here, there), LiveBytes() as live:
        sent, buffer = torch.ones(1024), torch.empty(1024)
        held = live.live
        for _ in range(3):
            here.send(sent, 0).wait()
            there.receive(buffer, 0).wait()
        assert (live.live, live.peak) == (held, held)
        assert bool(buffer.all())


def test_nothing_stays_open() -> None:
    """After `close` no descriptor and no thread is left."""
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for _ in range(5):
        with ends() as (here, there):
            here.send(torch.ones(1), 0).wait()
            there.receive(torch.zeros(1), 0).wait()
    assert len(os.listdir("/proc/self/fd")) == files
    assert threading.active_count() == threads


def test_only_ranks_that_know_the_secret_are_answered() -> None:
    """Strangers, silent callers and ranks that nobody expects are hung up on."""
    listener, address = local_rendezvous._listen("machine", 8)
    assert listener is not None
    assert address is not None
    wrong = local_rendezvous._Address("machine", address.name, bytes(16))
    calls = [
        local_rendezvous._call(wrong, each, rank) for each, rank in ((wrong, 1), (address, 2))
    ]
    calls += [local_rendezvous._call(address, address, rank) for rank in (3, 3, 4)]
    silent = socket.socket(socket.AF_UNIX)
    silent.connect(address.name)
    with listener:
        found = local_rendezvous._answer(listener, address.secret, {1, 2, 3})
    assert sorted(found) == [2, 3]
    assert local_rendezvous._call(wrong, address, 5) is None, "nobody listens any more"
    for end in (*calls, *found.values(), silent):
        assert end is not None
        end.close()


def test_ranks_of_other_machines_are_not_called() -> None:
    """Nor is a rank that says it listens but does not."""
    listener, address = local_rendezvous._listen("here", 8)
    assert listener is not None
    assert address is not None
    other = local_rendezvous._Address("there", address.name, address.secret)
    assert local_rendezvous._call(other, address, 1) is None
    listener.close()
    assert local_rendezvous._call(address, address, 1) is None
