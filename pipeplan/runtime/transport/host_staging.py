"""GPU tensors over gloo: through page-locked memory of the host.

So that several ranks may share one GPU, which NCCL refuses. The process waits until a tensor to be
sent has been computed and copied; a received one is copied in the compute stream, where its
reader comes next.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipeplan.runtime.transport.base import Pending

Move = Callable[[Tensor], Pending]
"""Hands a tensor of the host to the link, or posts its receive."""


class _StagedSend:
    """Keeps the copy until it has left."""

    def __init__(self, host: Tensor, carried: Pending) -> None:
        self._host, self._carried = host, carried

    def wait(self) -> None:
        self._carried.wait()


class _Received:
    """Brings the copy to its place once it is there."""

    def __init__(self, place: Tensor, host: Tensor, carried: Pending) -> None:
        self._place, self._host, self._carried = place, host, carried

    def wait(self) -> None:
        self._carried.wait()
        self._place.copy_(self._host, non_blocking=True)


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`; the process does not wait until what the GPU was given before is done.

    A copy from memory that is not page-locked would.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def send_staged(tensor: Tensor, move: Move) -> Pending:
    """Send a copy of `tensor` that lies on the host."""
    host = _beside(tensor)
    host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensor.device).synchronize()
    return _StagedSend(host, move(host))


def receive_staged(tensor: Tensor, move: Move) -> Pending:
    """Post a receive on the host whose `wait` fills `tensor`."""
    host = _beside(tensor)
    return _Received(tensor, host, move(host))


def _beside(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=True)
