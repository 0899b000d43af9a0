"""What an executor asks of whatever carries its messages."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Pending(Protocol):
    """A message on its way."""

    def wait(self) -> object:
        """Return once the message is complete; raise if the peer is gone or takes too long."""


class Transport(Protocol):
    """What an executor needs from the outside world."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Hand a contiguous `tensor` to the link; it must live until `wait` has returned."""

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """Post a receive into `tensor`, which is complete once `wait` has returned."""

    def flush(self) -> None:
        """Return once all that was sent arrives even if this process ends now."""

    def gather(self, value: object) -> list[Any]:
        """`value` of each rank, on every rank; everyone must call it."""
