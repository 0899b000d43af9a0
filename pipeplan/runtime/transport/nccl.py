"""Messages that stay on the GPUs: one NCCL communicator per channel (`communicators`).

A message is handed to the communicator's own stream, which first waits for what the compute
stream had been given until then; `wait` lets the compute stream, not the process, wait for it.
What has no channel travels as under gloo, as do norms and whatever lies on the processor.

The program is safe where a send blocks until its receive is posted ((O6) of
docs/reference/model.md, checked before the start), which is all that NCCL promises. Never run on
two GPUs yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, Store

from pipeplan.runtime.transport.backend import NCCL, BackendChoice
from pipeplan.runtime.transport.base import Pending, lost
from pipeplan.runtime.transport.gloo import GlooTransport
from pipeplan.runtime.transport.pair_communicator import (
    CommunicatorSpec,
    LentMessage,
    MakeCommunicator,
    PairCommunicator,
    lent,
    nccl,
)
from pipeplan.runtime.transport.peer_monitor import PeerMonitor
from pipeplan.runtime.transport.rank_grid import RankGrid, leaving


def on_gpu(tensor: Tensor) -> bool:
    """Whether NCCL can carry it."""
    return tensor.is_cuda


class NcclTransport(GlooTransport):
    """Sends what a channel is there for over that channel's own group, the rest over gloo."""

    def __init__(
        self,
        ranks: RankGrid,
        communicators: Sequence[CommunicatorSpec],
        device: torch.device,
        choice: BackendChoice = NCCL,
        *,
        make: MakeCommunicator = nccl,
        look: Callable[[ProcessGroup, Store], PeerMonitor] = PeerMonitor,
        carries: Callable[[Tensor], bool] = on_gpu,
    ) -> None:
        """Joins, makes its own channels in their order and sends a first message over each.

        Args:
            ranks: all ranks there are.
            communicators: the same on every rank.
            device: where this rank computes.
            choice: why messages take this way.
            make: makes the communicator of one channel.
            look: looks out for ranks that are gone.
            carries: which tensors may take a channel.
        """
        super().__init__(ranks, choice)
        self._carries = carries
        self._here = ranks.here
        self._device = device
        self.queues = device.type == "cuda"
        self._communicators: dict[tuple[int, int, int], PairCommunicator] = {}
        self._monitor: PeerMonitor | None = None
        try:
            self._open(ranks, communicators, make)
            store = PrefixStore("monitor", ranks.group.get_group_store())
            self._monitor = look(ranks.group, store)
        except BaseException:
            self.abandon()
            raise

    def _open(
        self, ranks: RankGrid, communicators: Sequence[CommunicatorSpec], make: MakeCommunicator
    ) -> None:
        flat = [rank for row in ranks.rows for rank in row]
        store = ranks.group.get_group_store()
        own: list[tuple[int, int, int]] = []
        for number, communicator in enumerate(communicators):
            source, target = flat[communicator.source], flat[communicator.target]
            if self._here not in (source, target):
                continue
            end = int(self._here == max(source, target))
            made = make(PrefixStore(f"channel{number}", store), end, ranks.timeout)
            self._communicators.update({(source, target, tag): made for tag in communicator.tags})
            own.append((source, target, communicator.tags[0]))
        for source, target, tag in own:
            self._connect(source, target, tag, self._device)

    def _connect(self, source: int, target: int, tag: int, device: torch.device) -> None:
        """Communicators connect at their first message, and block both ends until they have."""
        probe = torch.zeros(1, device=device)
        if self._here == source:
            self._send(probe, target, tag).wait()
        elif self._here == target:
            self._receive(probe, source, tag).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    @property
    def communicators(self) -> int:
        """How many end at this rank."""
        return len(set(self._communicators.values()))

    def gone(self) -> str:
        """See `GlooTransport`."""
        return self._monitor.gone() if self._monitor else ""

    def if_stuck(self, end: Callable[[str], None]) -> None:
        """Let `end` be called where a rank is gone and this process cannot find out."""
        if self._monitor:
            self._monitor.if_stuck(end)

    def abandon(self) -> None:
        """As the gloo transport; others hear of it, also while this process lives on."""
        if self._monitor:
            self._monitor.tell(f"rank {self._here} of all has failed")
        super().abandon()

    def close(self) -> None:
        """As `RankGrid.leave`, the channels first: no end goes while the other still computes."""
        with leaving(self.rank, self.abandon):
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            dist.barrier(self._group)
        if self._monitor:
            self._monitor.close()
        for communicator in dict.fromkeys(self._communicators.values()):
            communicator.shutdown()
        self._communicators.clear()
        super().close()

    def _send(self, tensor: Tensor, rank: int, tag: int) -> Pending:
        communicator = self._communicator(tensor, self._here, rank, tag)
        if communicator is None:
            return super()._send(tensor, rank, tag)
        try:
            return LentMessage(
                tensor, communicator.send([lent(tensor)], int(rank > self._here), 0)
            )
        except RuntimeError as error:
            lost(error)

    def _receive(self, tensor: Tensor, rank: int, tag: int) -> Pending:
        communicator = self._communicator(tensor, rank, self._here, tag)
        if communicator is None:
            return super()._receive(tensor, rank, tag)
        try:
            return LentMessage(
                tensor, communicator.recv([lent(tensor)], int(rank > self._here), 0)
            )
        except RuntimeError as error:
            lost(error)

    def _communicator(
        self, tensor: Tensor, source: int, target: int, tag: int
    ) -> PairCommunicator | None:
        """What carries `tensor`, if a channel does."""
        if not tensor.numel() or not self._carries(tensor):
            return None
        return self._communicators.get((source, target, tag))
