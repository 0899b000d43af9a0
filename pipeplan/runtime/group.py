"""Joining the ranks that torchrun started."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from pipeplan.errors import InputError, RankError
from pipeplan.plan import Plan
from pipeplan.runtime.backend import Machine, Wanted, device_of
from pipeplan.runtime.channels import Channel, channels
from pipeplan.runtime.host_room import check_host_room
from pipeplan.runtime.interruptible import interruptible
from pipeplan.runtime.nccl import ChannelTransport
from pipeplan.runtime.place import Place, check_meeting_point
from pipeplan.runtime.ranks import Ranks, check_mesh
from pipeplan.runtime.ties import find_ties
from pipeplan.runtime.transport import GlooTransport, LocalTransport
from pipeplan.task import SplitModel
from pipeplan.units import format_ns


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

    Raises:
        InputError: if the environment does not say where they find each other.
        RankError: if not all of them come in time.
    """
    if place.size == 1:
        return LocalTransport()
    check_meeting_point(os.environ)
    timeout = timedelta(microseconds=timeout_ns // 1000)

    def meet() -> Ranks:
        store, rank, size = next(rendezvous("env://", place.rank, place.size, timeout=timeout))
        own = PrefixStore(f"attempt{place.attempt}", store)
        return Ranks.started(own, rank, size, timeout, replicas)

    try:
        ranks = interruptible(meet)
    except dist.DistError as error:
        text = " ".join(str(error).split("\n")[0].split())
        raise RankError(
            f"rank {place.rank}: got no answer from all {place.size} ranks, need them within"
            f" {format_ns(timeout_ns)}: {text}"
        ) from error
    return ChannelTransport(ranks, channels, device) if device else GlooTransport(ranks)


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
    needed = needed_channels(plan, split, ranks, replicas) if nccl_device else ()
    return join(place, timeout_ns, replicas, needed, nccl_device)


def needed_channels(
    plan: Plan, split: SplitModel, ranks: int, replicas: int
) -> tuple[Channel, ...]:
    """Those of a training of `split` as `plan` says, on `replicas` times `ranks`."""
    ties = find_ties(plan.stages, split)
    return channels(plan.stages, split.boundaries, ranks, replicas, ties)


def for_pipeline(
    plan: Plan,
    split: SplitModel,
    replicas: int,
    mesh: DeviceMesh | None,
    backend: Wanted,
    timeout_ns: int,
) -> GlooTransport | LocalTransport:
    """A transport between the ranks of `mesh`, or those that torchrun started.

    Args:
        plan: names the GPUs of one replica.
        split: the model, where this rank computes.
        replicas: side by side; with a mesh 1 or as many as it has.
        mesh: see `Ranks.of`; None: rank = replica * GPUs + GPU.
        backend: what carries messages.
        timeout_ns: longest wait for one message.

    Raises:
        InputError: if ranks, mesh or backend do not fit the plan or each other.
    """
    place, gpus, device = Place.of(os.environ), len(plan.cluster.gpus), device_of(split)
    chosen = Machine.here().chosen(backend, place, device)
    nccl_device = device if chosen == "nccl" else None
    if mesh is not None:
        check_mesh(mesh, gpus)
        if replicas not in (1, mesh.size(0)):
            raise InputError(
                f"pipeline: got {replicas} replicas and a mesh of {mesh.size(0)}, need one of the"
                " two, or the same number"
            )
        check_host_room(plan, place, mesh.size(0))
        return _on_mesh(plan, split, mesh, timeout_ns, nccl_device)
    need = gpus * replicas
    if place.size != need:
        raise InputError(
            f"pipeline: got {place.size} ranks, need {need}, one per GPU of the plan"
            + (f" and replica: {gpus} x {replicas}" if replicas > 1 else "")
            + f". Run torchrun --nproc-per-node {need} with this script."
        )
    check_host_room(plan, place, replicas)
    return joined(plan, split, place, timeout_ns, replicas, nccl_device)


def _on_mesh(
    plan: Plan,
    split: SplitModel,
    mesh: DeviceMesh,
    timeout_ns: int,
    nccl_device: torch.device | None,
) -> GlooTransport | LocalTransport:
    """As `joined`, between ranks that are in a group already."""
    if mesh.size() == 1:
        return LocalTransport()
    timeout = timedelta(microseconds=timeout_ns // 1000)
    if nccl_device is None:
        return GlooTransport(interruptible(lambda: Ranks.of(mesh, timeout)))
    needed = needed_channels(plan, split, mesh.size(1), mesh.size(0))
    ranks = interruptible(lambda: Ranks.of(mesh, timeout))
    return ChannelTransport(ranks, needed, nccl_device)
