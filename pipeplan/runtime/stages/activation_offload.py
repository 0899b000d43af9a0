"""What one stage has on the host, by micro-batch: (H1) to (H7) of docs/reference/model.md.

Bytes go and come in the executor's thread, at FREE_O and PREFETCH, however fast the copies are: so
they follow the list of actions, not the clock (O7).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from pipeplan.errors import InternalError
from pipeplan.host_copy import Copies, CopyEngine, flat
from pipeplan.livebytes import key, storages
from pipeplan.runtime.stages.saved_tensors import (
    FreedStorage,
    SavedStorage,
    SavedTensor,
    SavedTensors,
    versions,
)

_Made = Callable[[], Copies]
"""Waits for copies, and returns them."""


@dataclass(slots=True)
class _OffloadedMicrobatch:
    """One micro-batch: on its way to the host, there, on its way back."""

    copies: _Made
    leaving: list[SavedStorage]
    gone: tuple[FreedStorage, ...] | None = None
    back: Future[None] | None = None
    size: int = 0
    """Bytes of its copies."""


class EarlyCopies:
    """Copies of a stage's input that began with the forward which reads it."""

    def __init__(self, inputs: Sequence[Tensor], fixed: Sequence[Tensor], way: CopyEngine) -> None:
        stay = storages(fixed)
        found = {key(each): each.detach() for each in inputs if key(each) not in stay}
        self._inputs = tuple(found.values())
        self._places = {name: place for place, name in enumerate(found)}
        self._versions = versions(self._inputs)
        parts = [flat(each.untyped_storage()) for each in self._inputs]
        self._copies = way.out(parts)

    def of(self, kept: Sequence[SavedStorage]) -> _Made | None:
        """What gives those of `kept` when they are made; None if one is missing.

        Or if the forward has written to its input: what was copied is not what is saved.
        """
        names = [key(each.saved[0].tensor()) for each in kept]
        unknown = any(name not in self._places for name in names)
        if unknown or self._versions != versions(self._inputs):
            return None
        copies, places = self._copies, [self._places[name] for name in names]
        return lambda: [copies.result()[place] for place in places]


class ActivationOffload:
    """The micro-batches of one stage that are offloaded now."""

    def __init__(self, stage: int, way: CopyEngine) -> None:
        self._stage = stage
        self._way = way
        self._trips: dict[int, _OffloadedMicrobatch] = {}
        self._early: dict[int, EarlyCopies] = {}
        self._left: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        """What has left and lives: others hold it, such as a table that a layer made once."""

    def begin(self, microbatch: int, inputs: Sequence[Tensor], fixed: Sequence[Tensor]) -> None:
        """Begins to copy the stage's `inputs`, which its forward reads meanwhile.

        Behind the forward `offload` finds what of them is saved.
        """
        self._early[microbatch] = EarlyCopies(inputs, fixed, self._way)

    def offload(
        self,
        microbatch: int,
        held: Iterable[SavedTensors],
        fixed: Sequence[Tensor],
        before: Sequence[SavedTensor] = (),
    ) -> None:
        """Begins to copy what `held` keep, but for the storages of `fixed`, to the host.

        With the stage's input goes what the stage `before` saved of it.

        Nor does it copy what another micro-batch sent there and others kept alive: (H1) counts
        what is of one micro-batch only, so such a storage goes once, with the first.
        """
        first, *rest = held  # the input is the first segment's
        found = [
            *first.kept(fixed, before),
            *(each for saved in rest for each in saved.kept(fixed)),
        ]
        kept = [each for each in found if each.storage not in self._left]
        self._left.update(each.storage for each in kept)
        early = self._early.pop(microbatch, None)
        copies = early.of(kept) if early else None
        if copies is None:
            copies = self._way.out([flat(each.storage) for each in kept]).result
        size = sum(each.storage.nbytes() for each in kept)
        self._trips[microbatch] = _OffloadedMicrobatch(copies, kept, size=size)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes on the host of each micro-batch that has any, until its backward takes them."""
        return tuple(trip.size for trip in self._trips.values())

    def free(self, microbatch: int) -> None:
        """Waits until all is copied, then gives it up, in the order in which it comes back.

        Raises:
            RuntimeError: if the copy failed, or something was written to that autograd saved.
        """
        trip = self._trips[microbatch]
        trip.copies()
        leaving = range(len(trip.leaving))
        trip.gone = tuple(FreedStorage.of(trip.leaving.pop(0)) for _ in leaving)

    def prefetch(self, microbatch: int) -> None:
        """Makes room for what was given up, and begins to bring it back.

        Raises:
            InternalError: if it was not given up.
        """
        trip = self._trips[microbatch]
        if trip.gone is None:
            raise self._wrong(microbatch, "brought back before it has left", "FREE_O")
        pairs = zip((gone.come_back() for gone in trip.gone), trip.copies(), strict=True)
        made = [(room, copy) for room, copy in pairs if room is not None]
        copies = [copy for _, copy in made]
        trip.gone = ()
        trip.back = self._way.back([room for room, _ in made], lambda: copies)

    def wait(self, microbatch: int) -> None:
        """Returns when nothing of `microbatch` is away; its copies are forgotten.

        Raises:
            InternalError: if it is away and not on its way back.
            RuntimeError: if the copy failed.
        """
        trip = self._trips.pop(microbatch, None)
        if trip is None:
            return
        if trip.back is None:
            raise self._wrong(microbatch, "needed while it is on the host", "PREFETCH")
        trip.back.result()
        self._way.join()

    def _wrong(self, microbatch: int, what: str, missing: str) -> InternalError:
        return InternalError(
            f"offload: micro-batch {microbatch} of stage {self._stage} is {what}: the program has"
            f" no {missing} before. Report this plan."
        )
