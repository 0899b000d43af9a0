"""Units: which storages are all that is kept of a boundary and the tape behind it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
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
from pipeplan.runtime.stages.saved_tensors import SavedStorage, SavedTensors

Storages = dict[int, weakref.ref[torch.UntypedStorage]]


def taped() -> AbstractContextManager[Any]:
    """While entered, autograd keeps tensors as where units may leave.

    It then releases them at other moments than without: bytes are to be measured so, too.
    """
    # Tensors of their own: an output kept by its own graph would never be released.
    return torch.autograd.graph.saved_tensors_hooks(Tensor.detach, lambda tensor: tensor)


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
            fixed: tensors that never leave: what layers hold, the input.
            pinned: what they lie in on the host of a CUDA device.
        """
        self._moved = moved
        self._fixed = tuple(fixed)
        self._host = OffloadedUnits(device, pinned)
        self._boundaries: dict[int, Storages] = {}
        self._tapes: dict[int, SavedTensors] = {}
        self._unused: dict[int, Event] = {}

    def made(self, boundary: int, tensors: Sequence[Tensor]) -> None:
        """Takes note of a boundary's storages, without keeping them."""
        self._boundaries[boundary] = _storages(tensors)
        if boundary in self._tapes:
            self._tapes[boundary].made(0, tensors)

    def taping(self, layer: int, inputs: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """Around the forward of `layer`: takes note of what autograd keeps, if it will leave."""
        if layer + 1 not in self._moved:
            return taped()
        tape = self._tapes[layer + 1] = SavedTensors(runs=((0, 0),), first_layer=layer)
        return tape.layer(0, inputs)

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
            self._host.offload(op.index, self._parts(op.index), self._saved(op.index), unused)

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
        """The living storages of the boundary of `unit`, as flat tensors."""
        others = set(_storages(self._fixed)) | set(_living(self._boundaries.get(unit - 1, {})))
        found = _living(self._boundaries.get(unit, {}))
        return [
            flat(storage)
            for name, storage in found.items()
            if name not in others and storage.nbytes()
        ]

    def _saved(self, unit: int) -> list[SavedStorage]:
        """What autograd saved in the forward of `unit` beside the boundaries."""
        return self._tapes[unit].kept(self._fixed) if unit in self._tapes else []


def _storages(tensors: Iterable[Tensor]) -> Storages:
    parts = [part for tensor in tensors for part in dense(tensor)]
    return {key(part): weakref.ref(part.untyped_storage()) for part in parts}


def _living(storages: Storages) -> dict[int, torch.UntypedStorage]:
    found = {name: reference() for name, reference in storages.items()}
    return {name: storage for name, storage in found.items() if storage is not None}
