"""A communicator between two ranks, made by these two alone.

`dist.new_group` is called by all ranks for each group, however many there are. With
`use_local_synchronization` its members are enough, but up to torch 2.13 at least the group's name
follows from how many groups a rank has, which differs between the two ends here: they would never
find each other. So each end makes torch's backend itself, under a name that both know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol, cast

from torch import Tensor
from torch.distributed.distributed_c10d import Store
from torch.utils.dlpack import from_dlpack

from pipeplan.runtime.transport.base import Pending


@dataclass(frozen=True, slots=True)
class CommunicatorSpec:
    """One direction between two ranks, counted over all replicas, for the messages of `tags`."""

    source: int
    target: int
    tags: tuple[int, ...]


class PairCommunicator(Protocol):
    """One of torch's communicators, as far as a channel needs it."""

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Pending:
        """Hand over one tensor for the other end, 0 or 1."""

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Pending:
        """Post a receive from the other end, 0 or 1."""

    def shutdown(self) -> None:
        """Leave together with the other end."""


MakeCommunicator = Callable[[Store, int, timedelta], PairCommunicator]
"""Store of these two ends, this one (0 or 1), longest wait for the other -> their link."""


def nccl(store: Store, end: int, timeout: timedelta) -> PairCommunicator:
    """A communicator of NCCL on the current GPU; it connects at its first message."""
    from torch.distributed.distributed_c10d import ProcessGroupNCCL  # in builds for GPUs alone

    options = ProcessGroupNCCL.Options()
    options._timeout = timeout  # noqa: SLF001  torch has no public name for it
    return cast("PairCommunicator", ProcessGroupNCCL(store, end, 2, options))


def lent(tensor: Tensor) -> Tensor:
    """The same memory, which torch's allocator does not know as its own.

    Of what NCCL is given otherwise the allocator remembers the stream (`record_stream`), and gives
    it out again only behind all that this stream has been told until then: behind receives that
    wait for later micro-batches, too. Whoever lends keeps `tensor` until `wait`, behind which the
    stream that reads or writes it next is ordered; so no such care is needed ((O7)).
    """
    found: Tensor = from_dlpack(tensor.detach())
    return found


class LentMessage:
    """Keeps the memory of a message until the stream that uses it next is behind the message."""

    __slots__ = ("_carried", "_tensor")

    def __init__(self, tensor: Tensor, carried: Pending) -> None:
        self._tensor: Tensor | None = tensor
        self._carried = carried

    def wait(self) -> None:
        """See `Pending`."""
        self._carried.wait()
        self._tensor = None
