"""What autograd saves in layers that offload, held such that it can go and come back.

A saved tensor is not handed to autograd but a `SavedTensor`, which may give the tensor up and get
it back in another storage. So nothing of others is ever emptied: a storage dies where nobody else
holds it (a table that a layer makes once and keeps does not).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipeplan.livebytes import key, storages
from pipeplan.plan import LayerRanges


class SavedTensor:
    """One tensor that autograd, or a checkpointed segment, saved; what is in it may be away."""

    __slots__ = ("__weakref__", "_place", "_tensor", "_version", "end", "entry", "layer")

    def __init__(self, tensor: Tensor, layer: int, end: bool) -> None:
        """Takes a tensor of layer `layer` of the chain."""
        self._tensor = tensor
        self.layer = layer
        self._version = tensor._version  # noqa: SLF001
        self._place: tuple[int | torch.SymInt, torch.Size, tuple[int, ...]] | None = None
        """Where in its storage it lies, while it is away."""
        self.end = end
        """Whether it stays: an end of its run, or in no run at all."""
        self.entry = False
        """Whether it is the stage's input, which leaves."""

    @property
    def away(self) -> bool:
        """Whether its storage was given up."""
        return self._place is not None

    @property
    def movable(self) -> bool:
        """Whether storage, shape and strides say all there is to say about the tensor."""
        tensor = self._tensor
        return (
            type(tensor) is Tensor
            and not tensor.is_nested
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
        )

    @property
    def written(self) -> bool:
        """Whether it was written to since it was saved."""
        return self._tensor._version != self._version  # noqa: SLF001

    def tensor(self) -> Tensor:
        """What autograd saved.

        Raises:
            RuntimeError: if it was written to since; behind hooks autograd itself does not look.
        """
        assert self._place is None, "read while it is away"
        if self.written:
            tensor = f"{self._tensor.dtype} of shape {list(self._tensor.shape)}"
            raise RuntimeError(
                f"task: layer {self.layer}: {tensor}, needed for the backward, was modified in"
                " place. Make the operation out of place, or plan without --offload."
            )
        return self._tensor

    def leave(self) -> None:
        """Gives the storage up.

        The hollow tensor goes on counting, with all that share its storage now, how often that is
        written to: so a write while it is away is seen, too.
        """
        tensor = self.tensor()
        self._place = (tensor.storage_offset(), tensor.shape, tensor.stride())
        tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)

    def come_back(self, storage: torch.UntypedStorage) -> None:
        """Holds the same tensor again, in `storage`."""
        assert self._place is not None, "comes back though it is there"
        tensor = torch.empty(0, dtype=self._tensor.dtype, device=storage.device)
        self._tensor.data = tensor.set_(storage, *self._place)
        self._place = None


@dataclass(frozen=True, slots=True)
class SavedStorage:
    """A storage and all that autograd saved in it."""

    storage: torch.UntypedStorage
    saved: tuple[SavedTensor, ...]


@dataclass(frozen=True, slots=True)
class FreedStorage:
    """A storage that was given up; it lives on where others hold it."""

    storage: weakref.ref[torch.UntypedStorage]
    size: int
    device: torch.device
    saved: tuple[SavedTensor, ...]

    @classmethod
    def of(cls, kept: SavedStorage) -> FreedStorage:
        """Lets go of all in `kept` but what the caller holds."""
        for saved in kept.saved:
            saved.leave()
        storage = kept.storage
        return cls(weakref.ref(storage), storage.nbytes(), storage.device, kept.saved)

    def come_back(self, make: Callable[[int], Tensor] | None = None) -> Tensor | None:
        """The storage is there again; what to copy into, where it had to be made.

        Args:
            make: a tensor of so many bytes; None: torch makes it.
        """
        room, storage = None, self.storage()
        if storage is None:
            room = make(self.size) if make else self._new()
            storage = room.untyped_storage()
        for saved in self.saved:
            saved.come_back(storage)
        return room

    def _new(self) -> Tensor:
        return torch.empty(self.size, dtype=torch.uint8, device=self.device)


class SavedTensors:
    """What autograd saved of one micro-batch in the offloaded runs of one segment.

    And of the segment's own input, in its first layer, where that is offloaded, too; and of its
    output, where that leaves as the input of the next stage. Of a checkpointed segment it is the
    input alone.
    """

    def __init__(
        self,
        runs: LayerRanges = (),
        first_layer: int = 0,
        *,
        own_input: bool = False,
        lending: int | None = None,
    ) -> None:
        """Takes what is offloaded.

        Args:
            runs: first and last index in the segment of each run.
            first_layer: the segment's place in the chain.
            own_input: whether the saved input leaves.
            lending: index of the last layer, whose saved output leaves with the next stage.
        """
        self._runs = runs
        self._first_layer = first_layer
        self._own_input = own_input
        self._lending = lending
        self._lent: list[weakref.ref[SavedTensor]] = []
        self._saved: list[weakref.ref[SavedTensor]] = []
        self._of_layer: list[weakref.ref[SavedTensor]] = []
        self._inputs: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def layer(self, index: int, inputs: Sequence[Tensor]) -> AbstractContextManager[Any]:
        """Around layer `index`, which gets the boundary `inputs`."""
        run = next((run for run in self._runs if run[0] <= index <= run[1]), None)
        self._of_layer = []
        enters = self._own_input and index == 0
        if run is None and not enters and index != self._lending:
            return nullcontext()
        self._inputs = {key(tensor): weakref.ref(tensor.untyped_storage()) for tensor in inputs}

        def pack(tensor: Tensor) -> SavedTensor:
            # A tensor of its own: an output kept by its own graph would never be released.
            one, layer = tensor.detach(), self._first_layer + index
            if tensor.layout is not torch.strided:  # no storage of its own: it stays
                return SavedTensor(one, layer, end=True)
            is_input = self._is_input(tensor)
            stays = run is None or (is_input and index == run[0])
            saved = SavedTensor(one, layer, stays and not (is_input and enters))
            saved.entry = is_input and enters
            self._of_layer.append(weakref.ref(saved))
            return saved

        return torch.autograd.graph.saved_tensors_hooks(pack, SavedTensor.tensor)

    def holding(self, inputs: Iterable[Tensor]) -> list[SavedTensor]:
        """The segment's `inputs` as all that it keeps; they live as long as what is returned."""
        held = [SavedTensor(each.detach(), self._first_layer, end=False) for each in inputs]
        if self._own_input:
            for saved in held:
                saved.entry = True
                self._saved.append(weakref.ref(saved))
        return held

    def made(self, index: int, outputs: Iterable[Tensor]) -> None:
        """Layer `index` has made `outputs`: where its run ends there, they stay."""
        if index == self._lending or any(index == last for _, last in self._runs):
            ends = {key(tensor) for tensor in outputs if not self._is_input(tensor)}
            at_ends = [each for each in _living(self._of_layer) if key(each.tensor()) in ends]
            for saved in at_ends:
                saved.end = True
            if index == self._lending:
                self._lent = [weakref.ref(saved) for saved in at_ends]
        self._saved += self._of_layer

    def lent(self) -> list[SavedTensor]:
        """What was saved of the output that leaves with the next stage."""
        return _living(self._lent)

    def keeps(self, tensors: Iterable[Tensor]) -> bool:
        """Whether the storage of one of `tensors` is among what autograd saved."""
        names = storages(tensors)
        return any(key(saved.tensor()) in names for saved in _living(self._saved))

    def kept(
        self, fixed: Iterable[Tensor], before: Iterable[SavedTensor] = ()
    ) -> list[SavedStorage]:
        """What lies between the ends of the runs, and the input: (H1) of docs/reference/model.md.

        Args:
            fixed: tensors that count elsewhere: weights and buffers.
            before: what the stage before saved of the input, if that leaves.
        """
        # What is lent may be away with the next stage's micro-batch: it is no more of this one's.
        own, before = [x for x in _living(self._saved) if not x.away], list(before)
        stay = storages(fixed) | _only_in_smaller([x for x in own if x.entry], before)
        stay |= {key(x.tensor()) for x in own if x.end}
        found: dict[int, list[SavedTensor]] = {}
        for saved in (*own, *before):
            name = key(saved.tensor())
            found.setdefault(name, []).append(saved)
            if not saved.movable:
                stay.add(name)
        return [
            SavedStorage(storage, tuple(group))
            for name, group in found.items()
            if name not in stay and (storage := group[0].tensor().untyped_storage()).nbytes()
        ]

    def _is_input(self, tensor: Tensor) -> bool:
        """Whether it lies in a storage of the layer's inputs; a dead one's name may be in use."""
        reference = self._inputs.get(key(tensor))
        return reference is not None and reference() is tensor.untyped_storage()


def _only_in_smaller(here: Sequence[SavedTensor], before: Sequence[SavedTensor]) -> set[int]:
    """Of what two stages save of a boundary, storages that only the one with fewer bytes saves.

    e(s) of (H1) is what the other one saves; these count among what stays.
    """
    sides = [
        {key(x.tensor()): x.tensor().untyped_storage().nbytes() for x in each}
        for each in (here, before)
    ]
    fewer, more = sorted(sides, key=lambda sizes: sum(sizes.values()))
    return set(fewer) - set(more)


def _living(references: Iterable[weakref.ref[SavedTensor]]) -> list[SavedTensor]:
    found = (reference() for reference in references)
    return [saved for saved in found if saved is not None]


def versions(tensors: Sequence[Tensor]) -> list[int]:
    """How often each was written to; torch has no public name for it."""
    return [tensor._version for tensor in tensors]  # noqa: SLF001
