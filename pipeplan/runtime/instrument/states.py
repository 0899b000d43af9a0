"""What a rank holds before its first action, and what each storage of it is for."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from pipeplan.livebytes import storage_bytes
from pipeplan.memory_terms import Key, Purpose
from pipeplan.runtime.build import Worker

Labelled = tuple[Purpose, int, Tensor]
"""Purpose, stage, a tensor that lives for the whole run."""


def states(worker: Worker) -> list[Tensor]:
    """Weights, gradients, optimizer state, buffers."""
    return [tensor for _, _, tensor in labelled_states(worker)]


def labelled_states(worker: Worker) -> Iterator[Labelled]:
    """The same by purpose and stage; of tensors that share a storage the first one says whose."""
    for index, stage in worker.stages.items():
        for slots in stage.slots:
            newest = slots.version % slots.versions
            for slot, row in enumerate(slots.leaves):
                purpose = Purpose.WEIGHTS if slot == newest else Purpose.OLDER_WEIGHTS
                yield from ((purpose, index, leaf.detach()) for leaf in row)
            for bank, gradients in enumerate(slots.banks):
                purpose = Purpose.WAITING_GRADIENTS if bank else Purpose.GRADIENTS
                yield from ((purpose, index, gradient) for gradient in gradients)
    for index, tensor in worker.tied.inboxes():
        yield Purpose.GRADIENTS, index, tensor
    for index, stage in worker.stages.items():
        for slots in stage.slots:
            yield from ((Purpose.OPTIMIZER, index, tensor) for tensor in slots.tensors())
        yield from ((Purpose.OPTIMIZER, index, tensor) for tensor in stage.state().values())


def host_states(worker: Worker) -> list[Key]:
    """What of a rank's states is on the host, in bytes."""
    found: dict[tuple[Purpose, int], int] = {}
    for index, stage in worker.stages.items():
        for unit in stage.units:
            if unit.host is None:
                continue
            for purpose, tensors in (
                (Purpose.WEIGHTS, unit.host.weights),
                (Purpose.GRADIENTS, unit.host.gradients),
                (Purpose.OPTIMIZER, unit.states()),
            ):
                key = purpose, index
                found[key] = found.get(key, 0) + storage_bytes(tensors)
    return [(*key, size) for key, size in found.items()]
