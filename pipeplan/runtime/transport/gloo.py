"""Messages between ranks. Only this and `nccl` hand any to torch.distributed.

Every directed boundary tensor has a tag of its own, so messages of different boundaries never wait
for each other, and messages of one tag arrive in the order they were sent. Small ones between
ranks of one machine travel over `local_socket`; gloo moves the others once the receive is posted.
`send` never blocks, `wait` does and lets other Python threads run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import ProcessGroup

from pipeplan.runtime.transport.backend import GLOO, BackendChoice
from pipeplan.runtime.transport.base import Pending, lost
from pipeplan.runtime.transport.host_staging import receive_staged, send_staged
from pipeplan.runtime.transport.rank_grid import RankGrid

_PROBE_TAG = (1 << 31) - 1


class _Done:
    def wait(self) -> None:
        return None


_DONE = _Done()


class GlooTransport:
    """Ranks of one replica in a gloo group of all replicas, with channels between neighbours."""

    queues = False
    """Whether whoever waits for a message is the GPU's current stream, and not this process."""

    def __init__(self, ranks: RankGrid, choice: BackendChoice = GLOO) -> None:
        """Takes the ranks.

        Args:
            ranks: all there are.
            choice: why messages take this way.
        """
        self._ranks = ranks
        self.choice = choice
        self._group = ranks.group
        self._channels = ranks.channels
        self.replica, self.rank = ranks.place
        self._row = ranks.rows[self.replica]
        self.replicas, self.size = len(ranks.rows), len(self._row)
        self.number = self.replica * self.size + self.rank
        """This rank among those of all replicas, 0-based."""
        self.ranks = self.replicas * self.size
        """How many these are."""
        self.store = ranks.store
        """Where the ranks found each other."""
        self._probes: list[object] = []
        self._groups: list[ProcessGroup] = []
        """Made beside that of the ranks, and left before it."""
        self._abandoned = False

    def send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """See `Transport`."""
        return self._send(tensor, self._row[peer], tag)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """See `Transport`."""
        return self._receive(tensor, self._row[peer], tag)

    def send_across(self, tensor: Tensor, replica: int) -> Pending:
        """As `send`, to this rank of another replica."""
        return self._send(tensor, self._ranks.rows[replica][self.rank], 0)

    def receive_across(self, tensor: Tensor, replica: int) -> Pending:
        """As `receive`, from this rank of another replica."""
        return self._receive(tensor, self._ranks.rows[replica][self.rank], 0)

    def _send(self, tensor: Tensor, rank: int, tag: int) -> Pending:
        """By socket, or as `dist.isend` does, without asking each time which group is meant."""
        if not tensor.numel():
            return _DONE
        if tensor.is_cuda:
            return send_staged(tensor, lambda host: self._send(host, rank, tag))
        channel = self._channels.carrying(tensor, rank)
        if channel is not None:
            return channel.send(tensor, tag)
        try:
            return self._group.send([tensor], rank, tag)
        except RuntimeError as error:
            lost(error)

    def _receive(self, tensor: Tensor, rank: int, tag: int) -> Pending:
        if not tensor.numel():
            return _DONE
        if tensor.is_cuda:
            return receive_staged(tensor, lambda host: self._receive(host, rank, tag))
        channel = self._channels.carrying(tensor, rank)
        if channel is not None:
            return channel.receive(tensor, tag)
        try:
            return self._group.recv([tensor], rank, tag)
        except RuntimeError as error:
            lost(error)

    def flush(self) -> None:
        """See `Transport`; a message over gloo that was waited for has arrived."""
        self._channels.flush()

    def gather(self, value: object) -> list[Any]:
        """See `Transport`."""
        values = self.gather_all(value)
        return [values[rank] for rank in self._row]

    def gather_all(self, value: object) -> list[Any]:
        """`value` of each rank of every replica, on all of them; everyone must call it."""
        values: list[Any] = [None] * self.size * self.replicas
        dist.all_gather_object(values, value, self._group)
        return values

    def mesh(self, device: str) -> DeviceMesh:
        """See `RankGrid.mesh`."""
        return self._ranks.mesh(device)

    def checkpoint_group(self, *, background: bool) -> ProcessGroup:
        """What the ranks of the first replica agree over while they save; all ranks call it.

        Args:
            background: whether they do so beside the training: then it needs connections of its
                own, as messages of two threads in one group would not come in one order.
        """
        if not background and self.replicas == 1:
            return self._group
        everybody = self.size * self.replicas
        ranks = sorted(dist.get_global_rank(self._group, rank) for rank in self._ranks.rows[0])
        local = everybody < dist.get_world_size()
        group: ProcessGroup = dist.new_group(
            ranks, backend="gloo", use_local_synchronization=local
        )
        if self.replica == 0:
            self._groups.append(group)
        return group

    def lost_peers(self) -> list[int]:
        """The ranks to which the connection is closed, as far as this one has noticed."""
        others = (peer for peer in range(self.size) if peer != self.rank)
        return [peer for peer in others if self._is_lost(self._row[peer])]

    def _is_lost(self, rank: int) -> bool:
        if self._channels.closed(rank):
            return True
        try:
            self._probes.append(self._group.send([torch.zeros(1)], rank, _PROBE_TAG))
        except RuntimeError:
            return True
        return False

    def gone(self) -> str:
        """Which rank is known to be gone though no message says so; empty for none."""
        return ""

    def if_stuck(self, end: Callable[[str], None]) -> None:
        """Let `end` be called where a rank is gone and this process cannot find out; never here.

        Whoever waits for a message is told by its connection.
        """

    def close(self) -> None:
        """See `RankGrid.leave`."""
        self._leave_groups()
        self._ranks.leave()

    def abandon(self) -> None:
        """See `RankGrid.abandon`: this rank has failed. Once is enough."""
        if not self._abandoned:
            self._abandoned = True
            self._leave_groups()
            self._ranks.abandon()

    def _leave_groups(self) -> None:
        for group in self._groups:
            with suppress(AssertionError, ValueError):  # destroyed before, with the default one
                dist.destroy_process_group(group)
        self._groups.clear()


class LocalTransport:
    """One rank alone: nothing to send to."""

    rank = 0
    size = 1

    def send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Never called: one rank has no peer."""
        raise ValueError(f"one rank cannot send to rank {peer}")

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Never called: one rank has no peer."""
        raise ValueError(f"one rank cannot receive from rank {peer}")

    def flush(self) -> None:
        """Nothing is ever sent."""

    def gather(self, value: object) -> list[Any]:
        """See `Transport`."""
        return [value]

    def gather_all(self, value: object) -> list[Any]:
        """As `GlooTransport` does."""
        return [value]

    def lost_peers(self) -> list[int]:
        """There is no peer."""
        return []

    def close(self) -> None:
        """Nothing to leave."""

    def abandon(self) -> None:
        """Nothing to close."""
