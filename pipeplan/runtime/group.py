"""Joining the ranks that torchrun started."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from pipeplan.errors import InputError, RankError
from pipeplan.plan import Plan
from pipeplan.runtime.backend import (
    QUEUES,
    Machine,
    Means,
    Wanted,
    agreed,
    ask_for_queues,
    device_of,
    lacking_queues,
)
from pipeplan.runtime.channels import channels
from pipeplan.runtime.host_room import check_host_room
from pipeplan.runtime.interruptible import interruptible
from pipeplan.runtime.nccl import ChannelTransport
from pipeplan.runtime.place import Place, check_meeting_point
from pipeplan.runtime.ranks import Ranks, check_mesh
from pipeplan.runtime.ties import find_ties
from pipeplan.runtime.transport import GlooTransport, LocalTransport
from pipeplan.task import SplitModel
from pipeplan.units import format_ns


@dataclass(frozen=True, slots=True)
class Training:
    """What asks for a transport: its messages follow from all of it."""

    plan: Plan
    split: SplitModel
    backend: Wanted

    def means(self) -> Means:
        """What this rank tells the others."""
        return Means.of(self.backend, self.split)

    def alone(self) -> LocalTransport:
        """For a single rank.

        Raises:
            InputError: if it wants a backend that cannot work.
        """
        agreed([self.means()])
        return LocalTransport()


def join(
    place: Place, timeout_ns: int, replicas: int = 1, training: Training | None = None
) -> GlooTransport | LocalTransport:
    """A transport between all ranks that torchrun started.

    The store is wrapped per attempt: after a restart the agent's store still holds the addresses
    of the ranks that died.

    Args:
        place: this process among the ranks.
        timeout_ns: longest wait for one message.
        replicas: of equal size, side by side.
        training: what the messages are of; None: gloo carries all.

    Raises:
        InputError: if the environment does not say where they find each other, or the ranks find
            no backend for all.
        RankError: if not all of them come in time.
    """
    if place.size == 1:
        return training.alone() if training else LocalTransport()
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
    return carried(ranks, training)


def carried(ranks: Ranks, training: Training | None) -> GlooTransport:
    """What carries messages of `training` between `ranks`, who all call it and agree on it.

    Raises:
        InputError: on all of them, if they find nothing for all.
    """
    if training is None:
        return GlooTransport(ranks)
    means: list[Any] = [None] * ranks.group.size()
    dist.all_gather_object(means, training.means(), ranks.group)
    try:
        choice = agreed([means[rank] for row in ranks.rows for rank in row])
    except InputError:
        ranks.leave()
        raise
    if choice.backend == "gloo":
        return GlooTransport(ranks, choice)
    needed = channels(
        training.plan.stages,
        training.split.boundaries,
        len(ranks.rows[0]),
        len(ranks.rows),
        find_ties(training.plan.stages, training.split),
    )
    transport = ChannelTransport(ranks, needed, device_of(training.split), choice)
    if advice := lacking_queues(os.environ.get(QUEUES), transport.channels):
        warnings.warn(advice, stacklevel=2)
    return transport


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
    place, gpus = Place.of(os.environ), len(plan.cluster.gpus)
    Machine.here().check(backend)
    ask_for_queues()
    training = Training(plan, split, backend)
    if mesh is not None:
        check_mesh(mesh, gpus)
        if replicas not in (1, mesh.size(0)):
            raise InputError(
                f"pipeline: got {replicas} replicas and a mesh of {mesh.size(0)}, need one of the"
                " two, or the same number"
            )
        check_host_room(plan, place, mesh.size(0))
        return _on_mesh(training, mesh, timeout_ns)
    need = gpus * replicas
    if place.size != need:
        raise InputError(
            f"pipeline: got {place.size} ranks, need {need}, one per GPU of the plan"
            + (f" and replica: {gpus} x {replicas}" if replicas > 1 else "")
            + f". Run torchrun --nproc-per-node {need} with this script."
        )
    check_host_room(plan, place, replicas)
    return join(place, timeout_ns, replicas, training)


def _on_mesh(
    training: Training, mesh: DeviceMesh, timeout_ns: int
) -> GlooTransport | LocalTransport:
    """As `join`, between ranks that are in a group already."""
    if mesh.size() == 1:
        return training.alone()
    timeout = timedelta(microseconds=timeout_ns // 1000)
    return carried(interruptible(lambda: Ranks.of(mesh, timeout)), training)
