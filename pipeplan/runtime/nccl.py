"""Messages that stay on the GPUs: one NCCL communicator per channel (`channels`).

A message is handed to the communicator's own stream, which first waits for what the compute
stream had been given until then; `wait` lets the compute stream, not the process, wait for it.
What has no channel travels as under gloo, as do norms and whatever lies on the processor.

The program is safe where a send blocks until its receive is posted ((O6) of docs/model.md,
checked before the start), which is all that NCCL promises. Never run on two GPUs yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroup, Store

from pipeplan.runtime.backend import NCCL, Choice
from pipeplan.runtime.channels import Channel
from pipeplan.runtime.links import Lent, Link, MakeLink, lent, nccl
from pipeplan.runtime.lookout import Lookout
from pipeplan.runtime.messages import Pending
from pipeplan.runtime.peerloss import lost
from pipeplan.runtime.ranks import Ranks
from pipeplan.runtime.transport import GlooTransport


def on_gpu(tensor: Tensor) -> bool:
    """Whether NCCL can carry it."""
    return tensor.is_cuda


class ChannelTransport(GlooTransport):
    """Sends what a channel is there for over that channel's own group, the rest over gloo."""

    def __init__(
        self,
        ranks: Ranks,
        channels: Sequence[Channel],
        device: torch.device,
        choice: Choice = NCCL,
        *,
        make: MakeLink = nccl,
        look: Callable[[ProcessGroup, Store], Lookout] = Lookout,
        carries: Callable[[Tensor], bool] = on_gpu,
    ) -> None:
        """Joins, makes its own channels in their order and sends a first message over each.

        Args:
            ranks: all ranks there are.
            channels: the same on every rank.
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
        self._links: dict[tuple[int, int, int], Link] = {}
        self._lookout: Lookout | None = None
        try:
            self._open(ranks, channels, make)
            store = PrefixStore("lookout", ranks.group.get_group_store())
            self._lookout = look(ranks.group, store)
        except BaseException:
            self.abandon()
            raise

    def _open(self, ranks: Ranks, channels: Sequence[Channel], make: MakeLink) -> None:
        flat = [rank for row in ranks.rows for rank in row]
        store = ranks.group.get_group_store()
        own: list[tuple[int, int, int]] = []
        for number, channel in enumerate(channels):
            source, target = flat[channel.source], flat[channel.target]
            if self._here not in (source, target):
                continue
            end = int(self._here == max(source, target))
            link = make(PrefixStore(f"channel{number}", store), end, ranks.timeout)
            self._links.update({(source, target, tag): link for tag in channel.tags})
            own.append((source, target, channel.tags[0]))
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
    def channels(self) -> int:
        """How many end at this rank."""
        return len(set(self._links.values()))

    def gone(self) -> str:
        """See `GlooTransport`."""
        return self._lookout.gone() if self._lookout else ""

    def if_stuck(self, end: Callable[[str], None]) -> None:
        """Let `end` be called where a rank is gone and this process cannot find out."""
        if self._lookout:
            self._lookout.if_stuck(end)

    def abandon(self) -> None:
        """As the gloo transport; others hear of it, also while this process lives on."""
        if self._lookout:
            self._lookout.tell(f"rank {self._here} of all has failed")
        super().abandon()

    def close(self) -> None:
        """As `Ranks.leave`, the channels first: no end goes while the other still computes."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        dist.barrier(self._group)
        if self._lookout:
            self._lookout.close()
        for link in dict.fromkeys(self._links.values()):
            link.shutdown()
        self._links.clear()
        super().close()

    def _send(self, tensor: Tensor, rank: int, tag: int) -> Pending:
        link = self._link(tensor, self._here, rank, tag)
        if link is None:
            return super()._send(tensor, rank, tag)
        try:
            return Lent(tensor, link.send([lent(tensor)], int(rank > self._here), 0))
        except RuntimeError as error:
            lost(error)

    def _receive(self, tensor: Tensor, rank: int, tag: int) -> Pending:
        link = self._link(tensor, rank, self._here, tag)
        if link is None:
            return super()._receive(tensor, rank, tag)
        try:
            return Lent(tensor, link.recv([lent(tensor)], int(rank > self._here), 0))
        except RuntimeError as error:
            lost(error)

    def _link(self, tensor: Tensor, source: int, target: int, tag: int) -> Link | None:
        """What carries `tensor`, if a channel does."""
        if not tensor.numel() or not self._carries(tensor):
            return None
        return self._links.get((source, target, tag))
