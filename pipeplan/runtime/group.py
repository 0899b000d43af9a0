"""Joining the ranks that torchrun started."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from pipeplan.runtime.place import Place
from pipeplan.runtime.transport import GlooTransport, LocalTransport


def join(place: Place, timeout_ns: int, replicas: int = 1) -> GlooTransport | LocalTransport:
    """A transport between all ranks that torchrun started.

    The store is wrapped per attempt: after a restart the agent's store still holds the addresses
    of the ranks that died.
    """
    if place.size == 1:
        return LocalTransport()
    timeout = timedelta(microseconds=timeout_ns // 1000)
    store, rank, size = next(rendezvous("env://", place.rank, place.size, timeout=timeout))
    own = PrefixStore(f"attempt{place.attempt}", store)
    return GlooTransport(own, rank, size, timeout, replicas)
