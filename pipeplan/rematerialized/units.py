"""Units: which storages are all that is kept of a boundary and the tape behind it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from threading import Event
from typing import Any

import torch
from torch import Tensor

from pipeplan.host_copy import flat
from pipeplan.livebytes import dense, key
from pipeplan.pinned import PinnedPool
from pipeplan.remat import DeviceOpKind
from pipeplan.rematerialized.host import OffloadedUnits
from pipeplan.rematerialized.script import Order

Storages = dict[int, weakref.ref[torch.UntypedStorage]]


def _forget(_: Tensor) -> None:
    pass


def taped(note: Callable[[Tensor], None] = _forget) -> AbstractContextManager[Any]:
    """While entered, `note` is told of each tensor that autograd keeps.

    Autograd then releases tensors at other moments than without: bytes are to be measured so, too.
    """

    def pack(tensor: Tensor) -> Tensor:
        note(tensor)
        # A tensor of its own: an output kept by its own graph would never be released.
        return tensor.detach()

    return torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)


class Units:
    """Finds and moves the storages of offloaded units (docs/reference/remat-rules.md §2)."""

    def __init__(
        self,
        device: torch.device,
        moved: frozenset[int],
        fixed: Sequence[Tensor],
        pinned: PinnedPool,
    ) -> None:
        """Takes what is known before the pass.

        Args:
            device: where the layers run.
            moved: the units that are offloaded.
            fixed: tensors that never leave: weights, buffers, the input.
            pinned: what they lie in on the host of a CUDA device.
        """
        self._moved = moved
        self._fixed = set(_storages(fixed))
        self._host = OffloadedUnits(device, pinned)
        self._boundaries: dict[int, Storages] = {}
        self._tapes: dict[int, Storages] = {}
        self._unused: dict[int, Event] = {}

    def made(self, boundary: int, tensors: Sequence[Tensor]) -> None:
        """Takes note of a boundary's storages, without keeping them."""
        self._boundaries[boundary] = _storages(tensors)

    def taping(self, layer: int) -> AbstractContextManager[Any]:
        """Around the forward of `layer`: takes note of what autograd keeps, if it will leave."""
        if layer + 1 not in self._moved:
            return taped()
        kept: Storages = {}
        self._tapes[layer + 1] = kept
        return taped(lambda tensor: kept.update(_storages([tensor])))

    def move(self, order: Order) -> None:
        """Runs an offload, a prefetch or a wait."""
        op = order.op
        if op.kind is DeviceOpKind.WAIT:
            self._host.wait(op.index)
        elif op.kind is DeviceOpKind.PREFETCH:
            self._host.prefetch(op.index)
        else:
            unused = Event() if order.used_later else None
            if unused is not None:
                self._unused[op.index] = unused
            self._host.offload(op.index, self._parts(op.index), unused)

    def used(self, units: Sequence[int]) -> None:
        """The last operation that reads those of `units` that are leaving has run."""
        for unit in units:
            if unit in self._unused:
                self._unused.pop(unit).set()

    def close(self) -> None:
        """Ends the transfers."""
        self._host.close()

    def drop(self) -> None:
        """Ends the wait for operations that will not run."""
        self._host.drop()

    def _parts(self, unit: int) -> list[Tensor]:
        """The living storages of `unit`, as flat tensors."""
        others = self._fixed | set(_living(self._boundaries.get(unit - 1, {})))
        found = _living(self._boundaries.get(unit, {}) | self._tapes.get(unit, {}))
        return [
            flat(storage)
            for name, storage in found.items()
            if name not in others and storage.nbytes()
        ]


def _storages(tensors: Iterable[Tensor]) -> Storages:
    parts = [part for tensor in tensors for part in dense(tensor)]
    return {key(part): weakref.ref(part.untyped_storage()) for part in parts}


def _living(storages: Storages) -> dict[int, torch.UntypedStorage]:
    found = {name: reference() for name, reference in storages.items()}
    return {name: storage for name, storage in found.items() if storage is not None}
