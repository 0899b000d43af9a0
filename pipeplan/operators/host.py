"""Storages on their way to the host and back, in order of issue.

A copy ends when it is waited for: the latest that a program allows. So what is alive is what the
judge counts (B3), and nothing overlaps.
"""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from pipeplan.operators.memory import Memory

Bases = dict[int, Tensor]
"""Value -> tensor, of one storage; no views."""


class LateHost:
    """The way between a device and its host, for one pass."""

    def __init__(self, memory: Memory, device: torch.device) -> None:
        self._memory, self._device = memory, device
        self._queue: deque[tuple[int, bool]] = deque()
        self._away: dict[int, Bases] = {}

    def offload(self, storage: int) -> None:
        """Queues a copy to the host."""
        self._queue.append((storage, True))

    def prefetch(self, storage: int) -> None:
        """Queues a copy back."""
        self._queue.append((storage, False))

    def wait(self, storage: int) -> None:
        """Makes all copies up to the last one of `storage`."""
        last = max(index for index, each in enumerate(self._queue) if each[0] == storage)
        for _ in range(last + 1):
            unit, out = self._queue.popleft()
            if out:
                self._away[unit] = _to_host(self._memory.bases(unit))
                self._memory.free(unit)
            else:
                self._back(unit)

    def holds(self, storage: int) -> bool:
        """Whether the host has a copy of `storage` and the device has none."""
        return storage in self._away

    def free(self, storage: int) -> None:
        """Forgets what is away of `storage`."""
        self._away.pop(storage, None)

    def _back(self, storage: int) -> None:
        for value, copied in self._away.pop(storage).items():
            tensor = torch.empty_strided(
                copied.shape, copied.stride(), dtype=copied.dtype, device=self._device
            )
            self._memory.put(value, tensor.copy_(copied))


def _to_host(tensors: Bases) -> Bases:
    """Copies with the same strides: each base is all of its storage."""
    # What lies on the host is none of a meter's of the device, which may be the processor, too.
    with _disable_current_modes():
        return {
            value: torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
            ).copy_(tensor)
            for value, tensor in tensors.items()
        }
