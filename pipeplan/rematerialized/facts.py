"""What one layer does to tensors: which it hands on, which its tape keeps, which it changes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeplan.capture.boundary_trace import call_layer
from pipeplan.capture.layer_costs.layer_bytes import LayerBytes
from pipeplan.capture.layer_costs.layer_run import LayerRun
from pipeplan.errors import InputError
from pipeplan.livebytes import dense, key, storage_bytes
from pipeplan.remat.schedules.costs import SharedStorage
from pipeplan.rematerialized.parts import Buffer, buffers_of


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFacts:
    """What one pass over a layer shows, beside its bytes."""

    left: tuple[bool, ...]
    """Which of its outputs give a gradient."""
    boundary_bytes: int
    """Of the storages behind its outputs."""
    rides: tuple[int | None, ...]
    """Per storage of its outputs: which of the inputs' it is; None for a new one."""
    keeps_input: tuple[bool, ...]
    """Which storages of its inputs its tape keeps."""
    keeps_output: tuple[bool, ...]
    """Which storages of its outputs."""
    sizes: tuple[int, ...]
    """Bytes of the storages of its outputs."""
    changed: tuple[Buffer, ...]
    """Buffers that its forward changes, or reads where another layer's changes them."""

    @property
    def changed_bytes(self) -> int:
        """Of these buffers."""
        return storage_bytes(each.tensor for each in self.changed)

    @property
    def shares(self) -> bool:
        """Whether an output lies in the memory of an input."""
        return any(place is not None for place in self.rides)


def fresh(run: LayerRun) -> tuple[Tensor, ...]:
    """Copies of a layer's inputs: no leaves, so that it may do with them as inside the model."""
    pairs = zip(run.inputs, run.differentiable, strict=True)
    own = (value.detach().requires_grad_(flag).clone() for value, flag in pairs)
    return (*own, *(value.clone() for value in run.fed))


def layer_facts(run: LayerRun) -> LayerFacts:
    """What one forward of `run` shows.

    Raises:
        InputError: if it fails, or changes what it gets in place.
    """
    inputs = fresh(run)
    versions = [value._version for value in inputs]  # noqa: SLF001
    before = [
        (each, each.tensor.clone(), each.tensor._version)  # noqa: SLF001
        for each in buffers_of([run.layer])
    ]
    outputs = call_layer(run.name, run.layer, inputs)
    if [value._version for value in inputs] != versions:  # noqa: SLF001
        raise InputError(
            f"rematerialize: layer {run.name!r}: works in place on its input, need an input that"
            " stays as it is, to compute the layer again. Make the operation out of place."
        )
    left = tuple(output.requires_grad for output in outputs)
    changed = tuple(
        each
        for each, value, version in before
        if each.tensor._version != version or not _equal(each.tensor, value)  # noqa: SLF001
    )
    into, out = _storages(inputs[: len(run.inputs)]), _storages(outputs)
    names = [id(storage) for storage in into]
    rides = [names.index(id(each)) if id(each) in names else None for each in out]
    sizes = tuple(storage.nbytes() for storage in out)
    watched = [[weakref.ref(storage) for storage in side] for side in (into, out)]
    graph = [output.grad_fn for output in outputs]
    del inputs, outputs, into, out
    entered, made = (tuple(each() is not None for each in side) for side in watched)
    del graph
    return LayerFacts(
        left=left,
        boundary_bytes=sum(sizes),
        rides=tuple(rides),
        keeps_input=entered,
        keeps_output=made,
        sizes=sizes,
        changed=changed,
    )


def _equal(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors of one layout have the same values."""
    return all(map(torch.equal, dense(first), dense(second)))


def _storages(tensors: Sequence[Tensor]) -> list[torch.UntypedStorage]:
    """The distinct ones, in order."""
    return list({key(tensor): tensor.untyped_storage() for tensor in tensors}.values())


def shared(facts: Sequence[LayerFacts], loss: LayerBytes) -> tuple[SharedStorage, ...]:
    """The storages of all boundaries, where one rides along in the next; none otherwise.

    The module's input has no bytes here: it is static.
    """
    if not any(each.shares for each in facts):
        return ()
    sizes, boundaries, tapes = [0], [{0}], [set[int]()]
    here = [0]
    for layer, each in enumerate(facts):
        for name, kept in zip(here, each.keeps_input, strict=True):
            tapes[name] |= {layer} if kept else set()
        there = []
        for place, size, kept in zip(each.rides, each.sizes, each.keeps_output, strict=True):
            name = len(sizes) if place is None else here[place]
            if place is None:
                sizes.append(size)
                boundaries.append(set())
                tapes.append(set())
            boundaries[name].add(layer + 1)
            tapes[name] |= {layer} if kept else set()
            there.append(name)
        here = there
    last = len(facts)
    tapes[here[0]] |= {last} if loss.saved_input else set()
    sizes.append(loss.output)
    boundaries.append({last + 1})
    tapes.append({last} if loss.saved_output else set())
    rows = zip(sizes, boundaries, tapes, strict=True)
    return tuple(SharedStorage(size, frozenset(full), frozenset(by)) for size, full, by in rows)
