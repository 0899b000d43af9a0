"""Messages that stay on the GPUs: one NCCL communicator per directed boundary.

A message is handed to the communicator's own stream, which first waits for what the compute
stream had been given until then; `wait` lets the compute stream, not the process, wait for it.
What has no channel (tied gradients) travels as under gloo, as do votes and whatever lies on the
processor.

The program is safe where a send blocks until its receive is posted ((O6) of docs/model.md,
checked before the start), which is all that NCCL promises. Never run on two GPUs yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup

from pipeplan.runtime.channels import Channel
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
        *,
        backend: str = "nccl",
        carries: Callable[[Tensor], bool] = on_gpu,
    ) -> None:
        """Joins, makes all channels in their order and sends a first message over each.

        Args:
            ranks: all ranks there are.
            channels: the same on every rank.
            device: where this rank computes.
            backend: of the channels' groups.
            carries: which tensors may take a channel.
        """
        super().__init__(ranks)
        self._carries = carries
        self._here = ranks.here
        self._device = device
        self._channels: dict[tuple[int, int, int], ProcessGroup] = {}
        try:
            self._open(ranks, channels, backend)
        except BaseException:
            self.abandon()
            raise

    def _open(self, ranks: Ranks, channels: Sequence[Channel], backend: str) -> None:
        flat = [rank for row in ranks.rows for rank in row]
        ends = [(flat[each.source], flat[each.target]) for each in channels]
        for (source, target), channel in zip(ends, channels, strict=True):
            group = dist.new_group([source, target], timeout=ranks.timeout, backend=backend)
            if self._here in (source, target):
                keys = ((source, target, tag) for tag in channel.tags)
                self._channels.update(dict.fromkeys(keys, group))
        for (source, target), channel in zip(ends, channels, strict=True):
            self._connect(source, target, channel.tags[0], self._device)

    def _connect(self, source: int, target: int, tag: int, device: torch.device) -> None:
        """Communicators connect at their first message, and block both ends until they have."""
        probe = torch.zeros(1, device=device)
        if self._here == source:
            self._send(probe, target, tag).wait()
        elif self._here == target:
            self._receive(probe, source, tag).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def close(self) -> None:
        """As `Ranks.leave`, the channels first: no end goes while the other still computes."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        dist.barrier(self._group)
        for group in dict.fromkeys(self._channels.values()):
            dist.destroy_process_group(group)
        self._channels.clear()
        super().close()

    def _send(self, tensor: Tensor, rank: int, tag: int) -> Pending:
        group = self._channel(tensor, self._here, rank, tag)
        if group is None:
            return super()._send(tensor, rank, tag)
        try:
            return group.send([tensor], int(rank > self._here), 0)
        except RuntimeError as error:
            lost(error)

    def _receive(self, tensor: Tensor, rank: int, tag: int) -> Pending:
        group = self._channel(tensor, rank, self._here, tag)
        if group is None:
            return super()._receive(tensor, rank, tag)
        try:
            return group.recv([tensor], int(rank > self._here), 0)
        except RuntimeError as error:
            lost(error)

    def _channel(self, tensor: Tensor, source: int, target: int, tag: int) -> ProcessGroup | None:
        """The group that carries `tensor`, if one does."""
        if not tensor.numel() or not self._carries(tensor):
            return None
        return self._channels.get((source, target, tag))
