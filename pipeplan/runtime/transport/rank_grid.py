"""The ranks of a run as a grid: one row per replica, one column per GPU of the plan.

The grid is a torch `DeviceMesh` with dimensions `dp` and `pp`: the user's, or one made for the
run, where rank = replica * P + GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup, Store

from pipeplan.errors import InputError, RankError
from pipeplan.runtime.transport import gloo_connections, local_rendezvous
from pipeplan.runtime.transport.local_socket import SocketChannels
from pipeplan.runtime.transport.send_queue import SendThread

NAMES = ("dp", "pp")


@dataclass(frozen=True, slots=True)
class RankGrid:
    """A gloo group and where in it everybody is."""

    group: ProcessGroup
    store: Store
    """Where the ranks found each other."""
    timeout: timedelta
    """Longest wait for one message before the run is given up."""
    rows: tuple[tuple[int, ...], ...]
    """Rank in the group by replica and GPU."""
    here: int
    """This rank in the group."""
    owned: bool
    """Whether the group is torch's default one and was made for the run."""
    channels: SocketChannels = field(default_factory=SocketChannels)
    """To ranks on this machine, for small messages."""
    connections: tuple[gloo_connections.Connection, ...] = ()
    """That the group made."""

    @classmethod
    def started(
        cls, store: Store, rank: int, size: int, timeout: timedelta, replicas: int = 1
    ) -> RankGrid:
        """Joins all ranks; returns once all have.

        Args:
            store: where the ranks find each other; must be empty of earlier attempts.
            rank: this rank among all.
            size: number of all ranks.
            timeout: longest wait for one message before the run is given up.
            replicas: of equal size, one behind the other.
        """
        before = gloo_connections.connections()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        group = dist.group.WORLD
        assert group is not None
        width = size // replicas
        rows = tuple(tuple(range(first, first + width)) for first in range(0, size, width))
        mine = gloo_connections.of_group(group, before)
        channels = _channels(group, timeout)
        return cls(
            group, store, timeout, rows, rank, owned=True, channels=channels, connections=mine
        )

    @classmethod
    def of(cls, table: Sequence[Sequence[int]], timeout: timedelta) -> RankGrid:
        """A group of its own for ranks of torch's default group; all of them call it.

        Args:
            table: these ranks by replica and GPU.
            timeout: longest wait for one message before the run is given up.
        """
        everybody = sorted(rank for row in table for rank in row)
        place = {rank: index for index, rank in enumerate(everybody)}
        before = gloo_connections.connections()
        # Names of local groups come again where one was left; then stores hold old addresses.
        local = len(everybody) < dist.get_world_size()
        group: ProcessGroup = dist.new_group(
            everybody, timeout=timeout, backend="gloo", use_local_synchronization=local
        )
        rows = tuple(tuple(place[rank] for rank in row) for row in table)
        mine = gloo_connections.of_group(group, before)
        channels = _channels(group, timeout)
        store, here = group.get_group_store(), group.rank()
        return cls(
            group, store, timeout, rows, here, owned=False, channels=channels, connections=mine
        )

    @property
    def place(self) -> tuple[int, int]:
        """Replica and GPU of this rank."""
        return next(
            (replica, row.index(self.here))
            for replica, row in enumerate(self.rows)
            if self.here in row
        )

    def mesh(self, device: str) -> DeviceMesh:
        """The grid as a mesh of `device` type, for what else the user does; all ranks call it."""
        return DeviceMesh(device, [list(row) for row in self.rows], mesh_dim_names=NAMES)

    def leave(self) -> None:
        """Leave together with all other ranks, so that nobody loses a message still under way.

        Raises:
            RankError: if another rank is gone; then this one leaves alone.
        """
        with leaving(self.place[1], self.abandon):
            dist.barrier(self.group)
        self.channels.close()
        dist.destroy_process_group(None if self.owned else self.group)

    def abandon(self) -> None:
        """Leave alone: whoever waits for this rank fails now; torch forgets the group.

        After that new ranks may be started in this process.
        """
        self.channels.close()
        for connection in self.connections:
            connection.sever()
        with suppress(AssertionError, ValueError):  # destroyed before, by whoever else used it
            dist.destroy_process_group(None if self.owned else self.group)


@contextmanager
def leaving(rank: int, abandon: Callable[[], None]) -> Iterator[None]:
    """Around waits for all others before this rank leaves; if one of them is gone, it abandons.

    Raises:
        RankError: if another rank is gone.
    """
    try:
        yield
    except BaseException as error:
        abandon()
        if not isinstance(error, RuntimeError):
            raise
        raise RankError(
            f"rank {rank}: another rank was gone when all were to leave: {error}"
        ) from error


def check_mesh(mesh: DeviceMesh, gpus: int) -> None:
    """Refuse a mesh that is no grid of replicas and the plan's `gpus`.

    Raises:
        InputError: if its dimensions are not `dp` and `pp`, or `pp` is not as wide.
    """
    if mesh.mesh_dim_names != NAMES:
        raise InputError(
            f"pipeline: mesh: got dimensions {mesh.mesh_dim_names}, need {NAMES}: replicas,"
            " then GPUs of the plan. Take init_device_mesh(device, (replicas, GPUs),"
            " mesh_dim_names=('dp', 'pp')), or such a part of a larger mesh."
        )
    if mesh.size(1) != gpus:
        raise InputError(
            f"pipeline: mesh: got {mesh.size(1)} ranks in dimension 'pp', need {gpus}, one"
            " per GPU of the plan"
        )


def _channels(group: ProcessGroup, timeout: timedelta) -> SocketChannels:
    """Channels to whom this rank finds; none where it lacks what they need. All ranks call it."""
    sender = _sender() if sys.platform == "linux" else None
    try:
        return SocketChannels(
            local_rendezvous.connect(group, takes_part=sender is not None), timeout, sender
        )
    except BaseException:
        if sender:
            sender.close()
        raise


def _sender() -> SendThread | None:
    try:
        return SendThread()
    except (OSError, RuntimeError):  # no more files or threads
        return None
