"""Forked ranks of what they take for one machine or several: which channels, what arrives.

Prints a line per case: the pairs with a line, and `exact` where every message between random pairs
of ranks, small or large, arrived where it belongs, and a training, if the case has one, equals the
reference bit for bit. Then one kills rank 1 and prints how rank 0, which waits for it, takes that;
and in the last one ranks end, in order and without a word, while their messages are under way.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.distributed import FileStore

sys.path.insert(0, str(Path(__file__).parents[2]))

from pipeplan.capture import split
from pipeplan.runtime.build import build
from pipeplan.runtime.data.feed import TaskFeed, Uses
from pipeplan.runtime.evaluation import evaluate
from pipeplan.runtime.transport import local_rendezvous, local_socket
from pipeplan.runtime.transport.base import PeerLostError, wait_all
from pipeplan.runtime.transport.gloo import GlooTransport
from pipeplan.runtime.transport.rank_grid import RankGrid
from pipeplan.task import Task
from tests import pipelines
from tests.distributed.gloo_cases import same
from tests.forked import run_ranks

RANKS = 4
SMALL_BYTES = 128
"""The limit in all cases: some messages of the toy model are larger, some are not."""
_MACHINE, _LISTEN = local_rendezvous.machine, local_rendezvous._listen


def together(rank: int) -> None:
    """All on one machine."""


def two_machines(rank: int) -> None:
    """Ranks 0 and 1, ranks 2 and 3."""
    local_rendezvous.machine = lambda: f"{_MACHINE()} {rank // 2}"


def unreachable(rank: int) -> None:
    """Rank 1 tells an address that nobody can reach, as from within another network."""

    def listen(machine: str, size: int) -> object:
        listener, address = _LISTEN(machine, size)
        assert address is not None
        return listener, replace(address, name=address.name + b"x") if rank == 1 else address

    local_rendezvous._listen = listen  # type: ignore[assignment]


def deaf(rank: int) -> None:
    """Rank 1 hears nobody who calls it, though they got through."""
    if rank == 1:
        local_rendezvous._answer = lambda *_: {}


def one_nameless(rank: int) -> None:
    """Rank 2 knows no name of its machine."""
    if rank == 2:
        local_rendezvous.machine = lambda: None


def all_nameless(_: int) -> None:
    """None does."""
    local_rendezvous.machine = lambda: None


def refused(rank: int) -> None:
    """Rank 1 gets no unix socket, rank 3 no file for its send thread."""

    def refuse(*_: object, **__: object) -> object:
        raise OSError(errno.EMFILE, "Too many open files")

    if rank == 1:
        socket.socket = refuse  # type: ignore[assignment,misc]
    if rank == 3:
        os.eventfd = refuse  # type: ignore[assignment]


CASES: tuple[Callable[[int], None], ...] = (
    *(together, two_machines, unreachable, deaf, one_nameless, all_nameless, refused),
)
TRAINED = (two_machines, all_nameless)


def joined(rank: int, store: str, patience_s: int = 60) -> GlooTransport:
    """One of `RANKS`."""
    torch.set_num_threads(1)
    local_socket.LIMIT_BYTES = SMALL_BYTES
    patience = timedelta(seconds=patience_s)
    return GlooTransport(RankGrid.started(FileStore(store, RANKS), rank, RANKS, patience))


def exchanged(transport: GlooTransport) -> bool:
    """Whether 200 messages of random ends, tags and sizes arrive, waited for in another order."""
    chance, here = random.Random(5), transport.rank
    moved, waits = [], []
    for number in range(200):
        source, target = chance.sample(range(RANKS), 2)
        tag, size = chance.randrange(6), chance.choice([0, 1, 15, 16, 17, 500])
        content = torch.full((size,), float(number), dtype=torch.float64)
        if source == here:
            waits.append(transport.send(content, target, tag))
            moved.append((content, content.clone()))
        elif target == here:
            buffer = torch.zeros_like(content)
            waits.append(transport.receive(buffer, source, tag))
            moved.append((buffer, content))
    random.Random(here).shuffle(waits)
    wait_all(waits)
    return all(torch.equal(there, sent) for there, sent in moved)


def work(rank: int, number: int, store: str) -> None:
    """One rank of one case; rank 0 compares and prints."""
    CASES[number](rank)
    transport = joined(rank, store)
    exact = exchanged(transport)
    if CASES[number] in TRAINED:
        plan = pipelines.plan_of([1, 3, 4, 5, 7], [0, 1, 2, 0, 1, 3], "2bw", microbatches=6)
        exact = same(plan, pipelines.toy, transport) and exact
    told = transport.gather((sorted(transport._channels._channels), exact))
    if rank == 0:
        pairs = [f"{a}{b}" for a, (others, _) in enumerate(told) for b in others if a < b]
        assert all(a in told[b][0] for a, (others, _) in enumerate(told) for b in others)
        word = "exact" if all(each for _, each in told) else "differs"
        print(
            f"{CASES[number].__name__}: {word}, channels {' '.join(pairs) or 'none'}", flush=True
        )
    transport.close()


def lose(rank: int, _: int, store: str) -> None:
    """Rank 1 dies; rank 0 waits for a message of it, the others for rank 0."""
    transport = joined(rank, store, patience_s=600)  # more than the script may take
    transport.gather(None)
    if rank == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        transport.receive(torch.zeros(1), int(rank == 0), 0).wait()
    except PeerLostError as error:
        if rank == 0:
            print(f"lost {transport.lost_peers()}: {error}", flush=True)
    os._exit(0)


class _Slow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.005)
        return x


def end(rank: int, _: int, store: str) -> None:
    """Two ranks evaluate, far apart, and end: no call comes after that."""
    if rank > 1:
        return
    torch.set_num_threads(1)
    transport = GlooTransport(
        RankGrid.started(FileStore(store, 2), rank, 2, timedelta(seconds=60))
    )
    width = local_socket.LIMIT_BYTES // 4
    task = Task(
        model=[nn.Linear(8, width), nn.Sequential(_Slow(), nn.Linear(width, 1))],
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        data=lambda _: (torch.ones(1, 8), torch.ones(1, 1)),
    )
    model, plan = split(task), pipelines.plan_of([1], [0, 1], "flush", 4, layers=2)
    pattern = pipelines.pattern_of(plan, period=3)
    feed = TaskFeed(task, model, Uses.of(plan, model, rank))
    worker = build(plan, pattern, model, task, feed, transport, pipelines.Listener(), seed=0)
    found = evaluate(pattern, worker.stages, worker.endpoints, feed, transport, 200)
    if rank:
        print(f"evaluated {len(found)}", flush=True)


def main() -> None:
    """All cases, one after the other."""
    for number in range(len(CASES)):
        run_ranks(work, RANKS, number)
    run_ranks(lose, RANKS, 0, also_fine=(-signal.SIGKILL,))
    run_ranks(end, RANKS, 0)


if __name__ == "__main__":
    main()
