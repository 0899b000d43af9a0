"""What the host allocates for a plan, once: groups of buffers, and tensors that it updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pipeplan.remat.states import StatePlan


class HostRoom:
    """Buffers by storage of the plan's graph; they live as long as training."""

    def __init__(self, plan: StatePlan) -> None:
        self._sizes = [each.bytes for each in plan.step.graph.storages]
        self._buffers: dict[int, Tensor] = {}
        self._blocks: list[Tensor] = []
        for group in plan.pinned:
            block = self._new(group.bytes)
            begin = 0
            for at in group.buffers:
                storage = plan.copied[at]
                self._buffers[storage] = block[begin : begin + self._sizes[storage]]
                begin += self._sizes[storage]
        for storage in plan.updated_on_host:
            self._buffers[storage] = self._new(self._sizes[storage])

    def _new(self, size: int) -> Tensor:
        self._blocks.append(torch.zeros(size, dtype=torch.uint8))
        return self._blocks[-1]

    @property
    def bytes(self) -> int:
        """Of all that was allocated."""
        return sum(each.untyped_storage().nbytes() for each in self._blocks)

    def take(self, storage: int, parts: Sequence[Tensor]) -> None:
        """Copies bytes of the device, which fill the storage's buffer."""
        for part, buffer in self._beside(storage, parts):
            buffer.copy_(part)

    def give(self, storage: int, parts: Sequence[Tensor]) -> None:
        """Copies them back."""
        for part, buffer in self._beside(storage, parts):
            part.copy_(buffer)

    def _beside(self, storage: int, parts: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Each part, and its place in the buffer."""
        begin = 0
        for part in parts:
            yield part, self._buffers[storage][begin : begin + part.nbytes]
            begin += part.nbytes

    def shown(self, storage: int, like: Tensor, at: int = 0) -> Tensor:
        """The buffer, or its part number `at`, as a tensor like `like`."""
        begin = at * like.nbytes
        whole = self._buffers[storage][begin : begin + like.nbytes]
        return whole.view(like.dtype).as_strided(like.shape, like.stride())
