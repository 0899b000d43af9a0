"""Joining the ranks that torchrun started."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from pipeplan.plan import Plan
from pipeplan.runtime.channels import Channel, channels
from pipeplan.runtime.nccl import ChannelTransport
from pipeplan.runtime.place import Place
from pipeplan.runtime.transport import GlooTransport, LocalTransport
from pipeplan.task import SplitModel


def join(
    place: Place,
    timeout_ns: int,
    replicas: int = 1,
    channels: Sequence[Channel] = (),
    device: torch.device | None = None,
) -> GlooTransport | LocalTransport:
    """A transport between all ranks that torchrun started.

    The store is wrapped per attempt: after a restart the agent's store still holds the addresses
    of the ranks that died.

    Args:
        place: this process among the ranks.
        timeout_ns: longest wait for one message.
        replicas: of equal size, side by side.
        channels: those of the plan, with a `device`.
        device: the GPU on which NCCL carries messages; None: gloo carries all.
    """
    if place.size == 1:
        return LocalTransport()
    timeout = timedelta(microseconds=timeout_ns // 1000)
    store, rank, size = next(rendezvous("env://", place.rank, place.size, timeout=timeout))
    own = PrefixStore(f"attempt{place.attempt}", store)
    if device is None:
        return GlooTransport(own, rank, size, timeout, replicas)
    return ChannelTransport(own, rank, size, timeout, replicas, channels, device)


def joined(
    plan: Plan,
    split: SplitModel,
    place: Place,
    timeout_ns: int,
    replicas: int,
    nccl_device: torch.device | None,
) -> GlooTransport | LocalTransport:
    """`join` for a training of `split` as `plan` says; `nccl_device` is what `join` has."""
    ranks = len(plan.cluster.gpus)
    needed = channels(plan.stages, split.boundaries, ranks, replicas) if nccl_device else ()
    return join(place, timeout_ns, replicas, needed, nccl_device)
