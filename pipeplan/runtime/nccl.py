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
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup, Store

from pipeplan.runtime.channels import Channel
from pipeplan.runtime.transport import GlooTransport, Pending, lost


def on_gpu(tensor: Tensor) -> bool:
    """Whether NCCL can carry it."""
    return tensor.is_cuda


class ChannelTransport(GlooTransport):
    """Sends what a channel is there for over that channel's own group, the rest over gloo."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        replicas: int,
        channels: Sequence[Channel],
        device: torch.device,
        *,
        backend: str = "nccl",
        carries: Callable[[Tensor], bool] = on_gpu,
    ) -> None:
        """Joins, makes all channels in their order and sends a first message over each.

        Args:
            store: see `GlooTransport`.
            rank: see `GlooTransport`.
            size: see `GlooTransport`.
            timeout: see `GlooTransport`.
            replicas: see `GlooTransport`.
            channels: the same on every rank.
            device: where this rank computes.
            backend: of the channels' groups.
            carries: which tensors may take a channel.
        """
        super().__init__(store, rank, size, timeout, replicas)
        self._carries = carries
        self._here = rank
        self._channels: dict[tuple[int, int, int], ProcessGroup] = {}
        for channel in channels:
            ends = [channel.source, channel.target]
            group = dist.new_group(ends, timeout=timeout, backend=backend)
            if rank in ends:
                keys = ((channel.source, channel.target, tag) for tag in channel.tags)
                self._channels.update(dict.fromkeys(keys, group))
        for channel in channels:
            self._connect(channel, device)

    def _connect(self, channel: Channel, device: torch.device) -> None:
        """Communicators connect at their first message, and block both ends until they have."""
        probe = torch.zeros(1, device=device)
        if self._here == channel.source:
            self._send(probe, channel.target, channel.tags[0]).wait()
        elif self._here == channel.target:
            self._receive(probe, channel.source, channel.tags[0]).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

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
