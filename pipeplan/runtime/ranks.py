"""The ranks of a run as a grid: one row per replica, one column per GPU of the plan.

The grid is a torch `DeviceMesh` with dimensions `dp` and `pp`: the user's, or one made for the
run, where rank = replica * P + GPU.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup, Store

from pipeplan.errors import InputError, RankError
from pipeplan.runtime import meeting, sever
from pipeplan.runtime.lines import Lines
from pipeplan.runtime.outgoing import Pusher

NAMES = ("dp", "pp")


@dataclass(frozen=True, slots=True)
class Ranks:
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
    lines: Lines = field(default_factory=Lines)
    """To ranks on this machine, for small messages."""
    connections: tuple[sever.Connection, ...] = ()
    """That the group made."""

    @classmethod
    def started(
        cls, store: Store, rank: int, size: int, timeout: timedelta, replicas: int = 1
    ) -> Ranks:
        """Joins all ranks; returns once all have.

        Args:
            store: where the ranks find each other; must be empty of earlier attempts.
            rank: this rank among all.
            size: number of all ranks.
            timeout: longest wait for one message before the run is given up.
            replicas: of equal size, one behind the other.
        """
        wanted, before = meeting.wanted(os.environ), sever.connections()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)
        group = dist.group.WORLD
        assert group is not None
        width = size // replicas
        rows = tuple(tuple(range(first, first + width)) for first in range(0, size, width))
        mine = sever.of_group(group, before)
        lines = _lines(group, timeout, wanted=wanted)
        return cls(group, store, timeout, rows, rank, owned=True, lines=lines, connections=mine)

    @classmethod
    def of(cls, table: Sequence[Sequence[int]], timeout: timedelta) -> Ranks:
        """A group of its own for ranks of torch's default group; all of them call it.

        Args:
            table: these ranks by replica and GPU.
            timeout: longest wait for one message before the run is given up.
        """
        everybody = sorted(rank for row in table for rank in row)
        place = {rank: index for index, rank in enumerate(everybody)}
        wanted, before = meeting.wanted(os.environ), sever.connections()
        # Names of local groups come again where one was left; then stores hold old addresses.
        local = len(everybody) < dist.get_world_size()
        group: ProcessGroup = dist.new_group(
            everybody, timeout=timeout, backend="gloo", use_local_synchronization=local
        )
        rows = tuple(tuple(place[rank] for rank in row) for row in table)
        mine = sever.of_group(group, before)
        lines = _lines(group, timeout, wanted=wanted)
        store, here = group.get_group_store(), group.rank()
        return cls(group, store, timeout, rows, here, owned=False, lines=lines, connections=mine)

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
        try:
            dist.barrier(self.group)
        except BaseException as error:
            self.abandon()
            if not isinstance(error, RuntimeError):
                raise
            raise RankError(
                f"rank {self.place[1]}: another rank was gone when all were to leave: {error}"
            ) from error
        self.lines.close()
        dist.destroy_process_group(None if self.owned else self.group)

    def abandon(self) -> None:
        """Leave alone: whoever waits for this rank fails now; torch forgets the group.

        After that new ranks may be started in this process.
        """
        self.lines.close()
        for connection in self.connections:
            connection.sever()
        with suppress(AssertionError, ValueError):  # destroyed before, by whoever else used it
            dist.destroy_process_group(None if self.owned else self.group)


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


def _lines(group: ProcessGroup, timeout: timedelta, *, wanted: bool) -> Lines:
    """Lines to whom this rank finds; none where it lacks what they need. All ranks call it."""
    pusher = _pusher() if wanted and sys.platform == "linux" else None
    try:
        return Lines(meeting.meet(group, takes_part=pusher is not None), timeout, pusher)
    except BaseException:
        if pusher:
            pusher.close()
        raise


def _pusher() -> Pusher | None:
    try:
        return Pusher()
    except (OSError, RuntimeError):  # no more files or threads
        return None
