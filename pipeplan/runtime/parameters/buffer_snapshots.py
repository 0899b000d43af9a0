"""Buffers of a stage as they were before a step, for a step that is dropped in its middle.

Forwards change buffers (running statistics) before the update of their step, so weights of the
last finished step belong to buffers of another moment. Copies lie in the host's memory, outside
of torch's: no plan and no instrument counts them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pipeplan.layout import overwrite
from pipeplan.livebytes import storage_bytes
from pipeplan.pinned import PinnedPool

_BYTES_PER_S = 5e9
"""What copying takes at most, roughly."""


@dataclass(frozen=True, slots=True)
class _Kept:
    module: nn.Module
    name: str
    tensor: Tensor
    copy: Callable[[], Tensor]

    def put_back(self) -> None:
        if getattr(self.module, self.name) is not self.tensor:
            setattr(self.module, self.name, self.tensor)
        overwrite(self.tensor, self.copy())


class BufferSnapshots:
    """The buffers of some layers before each step that may be dropped."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        """Remembers nothing yet."""
        self._modules = tuple(dict.fromkeys(m for layer in layers for m in layer.modules()))
        self._kept: dict[int, list[_Kept]] = {}
        self._pool = PinnedPool()

    def buffers(self) -> dict[tuple[nn.Module, str], Tensor]:
        """All buffers, as they are now."""
        return {
            (module, name): tensor
            for module in self._modules
            for name, tensor in module.named_buffers(recurse=False)
        }

    @property
    def copy_s(self) -> float:
        """How long `remember` takes, roughly."""
        return storage_bytes(self.buffers().values()) / _BYTES_PER_S

    def remember(self, step: int, since: int) -> None:
        """Copy the buffers before the first forward of `step`; forget steps before `since`."""
        if step in self._kept:
            return
        for old in [each for each in self._kept if each < since]:
            del self._kept[old]
        self._kept[step] = [
            _Kept(module, name, tensor, self._copied(tensor))
            for (module, name), tensor in self.buffers().items()
        ]

    def turn_back(self, step: int) -> None:
        """Let buffers be as before `step`, where a forward of it has been."""
        for kept in self._kept.get(step, ()):
            kept.put_back()

    def _copied(self, tensor: Tensor) -> Callable[[], Tensor]:
        if tensor.layout is not torch.strided:
            sparse = tensor.detach().clone()  # has no bytes in a row
            return lambda: sparse
        if tensor.device.type != "cpu":
            there = self._pool.empty_like(tensor).copy_(tensor.detach(), non_blocking=True)
            return lambda: there
        flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
        array = flat.view(torch.uint8).numpy().copy()
        shape, dtype = tensor.shape, tensor.dtype
        return lambda: torch.from_numpy(array).view(dtype).reshape(shape)
