"""Gradients as a few large messages: what is sent together, and how far ahead."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeplan.runtime.transport.base import Pending, wait_all

BUCKET_BYTES = 2**25
"""What one message carries at most: enough for any link's full bandwidth."""
_AHEAD = 2
"""Messages per direction that may be under way: one travels while another is added up."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Parts of gradients of one type, one behind the other."""

    parts: tuple[Tensor, ...]
    """One-dimensional views of them."""

    def blank(self) -> Tensor:
        """Room for all of it."""
        return self.parts[0].new_empty(sum(part.numel() for part in self.parts))

    def gathered(self) -> Tensor:
        """All of it, copied only where it has several parts."""
        return torch.cat(self.parts) if len(self.parts) > 1 else self.parts[0]

    def add_to(self, sums: Tensor) -> None:
        """Add it to sums of the same size."""
        for part, place in self._pairs(sums):
            place.add_(part)

    def put(self, means: Tensor) -> None:
        """Let the gradients be `means`."""
        for part, place in self._pairs(means):
            part.copy_(place)

    def _pairs(self, flat: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        return zip(self.parts, flat.split([part.numel() for part in self.parts]), strict=True)


def buckets(gradients: Sequence[Tensor], size: int = BUCKET_BYTES) -> list[Bucket]:
    """All of `gradients` in their order, in messages of up to `size` bytes of one type.

    Args:
        gradients: each without gaps between its numbers, as torch makes them.
        size: at least that of a number.
    """
    found: list[list[Tensor]] = []
    room = 0
    for gradient in gradients:
        for part in _flat(gradient).split(max(1, size // gradient.itemsize)):
            if not part.numel():
                continue
            if not found or found[-1][0].dtype != part.dtype or part.nbytes > room:
                found.append([])
                room = size
            found[-1].append(part)
            room -= part.nbytes
    return [Bucket(tuple(parts)) for parts in found]


def _flat(gradient: Tensor) -> Tensor:
    """Its numbers in the order of memory, which replicas of one parameter have in common."""
    if gradient.is_contiguous():
        return gradient.view(-1)
    return gradient.as_strided((gradient.numel(),), (1,))


class Inflow:
    """Receives of one direction, posted ahead and taken in order."""

    def __init__(self, receive: Callable[[Tensor], Pending]) -> None:
        """Posts nothing yet; `receive` posts one."""
        self._receive = receive
        self._wanted: deque[Bucket] = deque()
        self._posted: deque[tuple[Tensor, Pending]] = deque()

    def want(self, more: Iterable[Bucket]) -> None:
        """Say what comes next."""
        self._wanted.extend(more)
        self._post()

    def take(self) -> Tensor:
        """The next one, once it is there."""
        buffer, pending = self._posted.popleft()
        wait_all([pending])
        self._post()
        return buffer

    def _post(self) -> None:
        while self._wanted and len(self._posted) < _AHEAD:
            buffer = self._wanted.popleft().blank()
            self._posted.append((buffer, self._receive(buffer)))


class Outflow:
    """Sends of one direction; few at a time hold their memory."""

    def __init__(self, send: Callable[[Tensor], Pending]) -> None:
        """Sends nothing yet; `send` hands over one message."""
        self._send = send
        self._sent: deque[tuple[Tensor, Pending]] = deque()

    @property
    def is_full(self) -> bool:
        """Whether the next one waits for one before it."""
        return len(self._sent) >= _AHEAD

    def put(self, flat: Tensor) -> None:
        """Send `flat`, behind an earlier one if there are many."""
        if self.is_full:
            wait_all([self._sent.popleft()[1]])
        self._sent.append((flat, self._send(flat)))

    def settle(self) -> None:
        """Return once all have left."""
        wait_all([pending for _, pending in self._sent])
        self._sent.clear()
