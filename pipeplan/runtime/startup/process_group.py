"""Joining the ranks that torchrun started."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from pipeplan.errors import InputError, RankError
from pipeplan.plan import Plan
from pipeplan.repeat import fingerprint
from pipeplan.runtime.parameters.tied_parameters import find_ties
from pipeplan.runtime.startup.communicators import communicators
from pipeplan.runtime.startup.facts import compute_facts
from pipeplan.runtime.startup.handshake import Facts, agree, send_refusal
from pipeplan.runtime.startup.host_memory import check_host_room
from pipeplan.runtime.startup.shared_directory import check_shared
from pipeplan.runtime.transport.backend import (
    QUEUES,
    Machine,
    Means,
    Wanted,
    agreed,
    ask_for_queues,
    device_of,
    lacking_queues,
)
from pipeplan.runtime.transport.base import interruptible
from pipeplan.runtime.transport.gloo import GlooTransport, LocalTransport
from pipeplan.runtime.transport.nccl import NcclTransport
from pipeplan.runtime.transport.rank_grid import RankGrid, check_mesh
from pipeplan.runtime.transport.torchrun_env import TorchrunEnv, check_rendezvous_address
from pipeplan.split_model import SplitModel
from pipeplan.units import counted, format_ns


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


@dataclass(frozen=True, slots=True)
class JoinTerms:
    """What ranks find out about each other before they make any group."""

    facts: Callable[[], Facts] = Facts
    """What all must have alike, made where there are several."""
    out: Path | None = None
    """A directory that all must share."""

    def agree(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        """Return once all ranks have come on the same terms; see `handshake.agree`."""
        facts = self.facts()
        agree(store, rank, size, replace(facts, alike={**compute_facts(), **facts.alike}), timeout)
        if self.out is not None:
            check_shared(PrefixStore("out", store), rank, size, self.out, timeout)


_NO_TERMS = JoinTerms()


def join(
    place: TorchrunEnv,
    timeout_ns: int,
    replicas: int = 1,
    training: Training | None = None,
    terms: JoinTerms = _NO_TERMS,
) -> GlooTransport | LocalTransport:
    """A transport between all ranks that torchrun started.

    Args:
        place: this process among the ranks.
        timeout_ns: longest wait for one message.
        replicas: of equal size, side by side.
        training: what the messages are of; None: gloo carries all.
        terms: what all ranks must agree in.

    Raises:
        InputError: if the environment does not say where they find each other, they differ, or
            find no backend for all.
        RankError: if not all of them come in time.
    """
    if place.size == 1:
        return training.alone() if training else LocalTransport()
    check_rendezvous_address(os.environ)
    timeout = timedelta(microseconds=timeout_ns // 1000)

    def meet() -> RankGrid:
        store = _rendezvous_store(place, timeout)
        terms.agree(store, place.rank, place.size, timeout)
        return RankGrid.started(store, place.rank, place.size, timeout, replicas)

    return make_transport(_joined(meet, place.rank, place.size, timeout_ns), training)


def _joined(meet: Callable[[], RankGrid], rank: int, size: int, timeout_ns: int) -> RankGrid:
    try:
        return interruptible(meet)
    except dist.DistError as error:
        text = " ".join(str(error).split("\n")[0].split())
        raise RankError(
            f"rank {rank}: got no answer from all {size} ranks, need them within"
            f" {format_ns(timeout_ns)}: {text}"
        ) from error


def _rendezvous_store(place: TorchrunEnv, timeout: timedelta) -> Store:
    """A store of all ranks that nothing was put into before.

    After a restart the launcher's still holds the addresses of the ranks that died, and whoever
    joins again in one process those of its earlier groups.
    """
    store, _, _ = next(rendezvous("env://", place.rank, place.size, timeout=timeout))
    return _fresh(PrefixStore(f"attempt{place.attempt}", store), place.rank)


def _fresh(store: Store, rank: int) -> Store:
    """A part of `store` for one rendezvous: the n-th of each rank is the n-th of all."""
    return PrefixStore(f"join{store.add(f'joins{rank}', 1)}", store)


def tell_refusal(place: TorchrunEnv, text: str, patience_s: float) -> bool:
    """Let the ranks that join know that this one never will.

    Args:
        place: this process among the ranks.
        text: why.
        patience_s: longest wait for rank 0.

    Returns:
        Whether rank 0 knows, and so says it.
    """
    patience = timedelta(seconds=patience_s)
    try:
        check_rendezvous_address(os.environ)
        return interruptible(
            lambda: send_refusal(
                _rendezvous_store(place, patience), place.rank, place.size, text, patience
            )
        )
    except (InputError, dist.DistError):
        return False


def make_transport(ranks: RankGrid, training: Training | None) -> GlooTransport:
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
    needed = communicators(
        training.plan.stages,
        training.split.boundaries,
        len(ranks.rows[0]),
        len(ranks.rows),
        find_ties(training.plan.stages, training.split),
    )
    transport = NcclTransport(ranks, needed, device_of(training.split), choice)
    if advice := lacking_queues(os.environ.get(QUEUES), transport.communicators):
        warnings.warn(advice, stacklevel=2)
    return transport


def gpu_of(gpus: int, mesh: DeviceMesh | None) -> int:
    """Which of the plan's `gpus` this rank is going to be under `for_pipeline`.

    Raises:
        InputError: if the mesh is not one of replicas and GPUs.
    """
    if mesh is None:
        return TorchrunEnv.of(os.environ).rank % gpus
    check_mesh(mesh, gpus)
    return mesh.get_local_rank("pp")


def for_pipeline(
    training: Training,
    replicas: int,
    mesh: DeviceMesh | None,
    timeout_ns: int,
    terms: JoinTerms,
) -> GlooTransport | LocalTransport:
    """A transport between the ranks of `mesh`, of torch's default group, or of torchrun.

    Args:
        training: names the GPUs of one replica, the model and what carries messages.
        replicas: side by side; with a mesh 1 or as many as it has.
        mesh: see `RankGrid.of`; None: rank = replica * GPUs + GPU.
        timeout_ns: longest wait for one message.
        terms: what all ranks must agree in.

    Raises:
        InputError: if ranks, mesh or backend do not fit the plan or each other.
    """
    plan = training.plan
    place, gpus = _place(), len(plan.cluster.gpus)
    Machine.here().check(training.backend)
    ask_for_queues()
    if mesh is not None:
        check_mesh(mesh, gpus)
        if replicas not in (1, mesh.size(0)):
            raise InputError(
                f"pipeline: got {replicas} replicas and a mesh of {mesh.size(0)}, need one of the"
                " two, or the same number"
            )
        check_host_room(plan, place, mesh.size(0))
        rows = [[int(rank) for rank in row] for row in mesh.mesh.tolist()]
        return _among(training, rows, timeout_ns, terms)
    need = gpus * replicas
    if place.size != need:
        raise InputError(
            f"pipeline: got {counted(place.size, 'rank')}, need {need}, one per GPU of the plan"
            + (f" and replica: {gpus} x {replicas}" if replicas > 1 else "")
            + f". Run torchrun --nproc-per-node {need} with this script."
        )
    check_host_room(plan, place, replicas)
    if dist.is_initialized():
        rows = [[replica * gpus + gpu for gpu in range(gpus)] for replica in range(replicas)]
        return _among(training, rows, timeout_ns, terms)
    return join(place, timeout_ns, replicas, training, terms)


def _place() -> TorchrunEnv:
    """This process among the ranks of torch's default group, if there is one."""
    if not dist.is_initialized():
        return TorchrunEnv.of(os.environ)
    rank, size = dist.get_rank(), dist.get_world_size()
    return TorchrunEnv.of({**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size)})


def _among(
    training: Training, rows: Sequence[Sequence[int]], timeout_ns: int, terms: JoinTerms
) -> GlooTransport | LocalTransport:
    """As `join`, between ranks of torch's default group, by replica and GPU."""
    everybody = sorted(rank for row in rows for rank in row)
    size, here = len(everybody), everybody.index(dist.get_rank())
    if size == 1:
        return training.alone()
    timeout = timedelta(microseconds=timeout_ns // 1000)

    def meet() -> RankGrid:
        assert dist.group.WORLD is not None
        name = fingerprint([torch.tensor(everybody)])
        found = PrefixStore(f"pipeplan{name}", dist.group.WORLD.get_group_store())
        terms.agree(_fresh(found, here), here, size, timeout)
        return RankGrid.of(rows, timeout)

    return make_transport(_joined(meet, here, size, timeout_ns), training)
