"""Builds models of which only some parameters take memory, bit for bit as if all did.

A parameter is known by its number: the n-th that the code constructs. Those to keep are built as
ever. The others are *ghosts*: empty from their birth. What fills a ghost (`normal_`, `fill_`, ..)
gets memory for it, works on it as it would have, and so moves the generator as it would have;
the next ghost takes the memory away again. So at most the largest parameter's bytes are spent on
ghosts at once, and values of the moment are real: initialisers that look at what they have drawn
work. What is computed from a ghost without memory is empty too, and known to depend on it. Where
code needs a value that is gone, or keeps something that depends on one, the parameter is *wanted*:
build again, and keep it.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from pipeplan.capture.fake_tensors.ghost_modes import GhostFunctions, GhostOperations, GhostReads
from pipeplan.empty import (
    bytes_of,
    emptied,
    give_back_free_memory,
    is_empty,
    storage_of,
)

_Numbers = frozenset[int]
_BUILDING = threading.Lock()
"""Held while the constructor of parameters is another one."""


@dataclass(frozen=True, slots=True)
class _Ghost:
    """A storage that is empty, or may be at any time."""

    storage: UntypedStorage
    """Alive, so that no other takes its identity."""
    size: int
    """In bytes, when it has memory."""
    numbers: _Numbers
    """Of the parameters that its values follow from."""


class Ghosts:
    """The parameters of one build."""

    def __init__(self, keep: _Numbers = frozenset(), *, draws: bool) -> None:
        """Says what will have memory.

        Args:
            keep: numbers of the parameters that are built as ever.
            draws: whether ghosts are initialised, to move the generator as they would have.
        """
        self.keep = keep
        self.parameters: list[nn.Parameter] = []
        """By number."""
        self.wanted: set[int] = set()
        """Numbers of ghosts whose values something needs."""
        self.drifted = False
        """Whether the generator was used after a draw that was left out: it may have given other
        numbers to what is no parameter."""
        self._draws = draws
        self._skipped = False
        self._known: dict[int, _Ghost] = {}
        """By the identity of their storages."""
        self._hand: dict[int, int] = {}
        """Bytes of the ghosts that have memory, oldest first."""
        self._largest = 0
        """Bytes of the largest parameter so far."""

    @contextmanager
    def building(self) -> Iterator[None]:
        """Around the code that constructs the model, in this thread."""
        with _BUILDING, self._numbering(), self.guarding():
            try:
                yield
            finally:
                while self._hand:
                    self._drop_oldest()

    @contextmanager
    def _numbering(self) -> Iterator[None]:
        """Counts the parameters that this thread constructs."""
        usual, thread = nn.Parameter.__new__, threading.get_ident()

        def make(cls: type, data: Any = None, requires_grad: bool = True) -> Any:
            plain = type(data) in (Tensor, nn.Parameter) and storage_of(data) is not None
            if not plain or threading.get_ident() != thread:
                return usual(cls, data, requires_grad)
            number = len(self.parameters)
            self._largest = max(self._largest, bytes_of(data))
            if number not in self.keep:
                data = self._ghost(data, self.numbers_of(data) | {number})
            made: nn.Parameter = usual(cls, data, requires_grad)
            self.parameters.append(made)
            return made

        nn.Parameter.__new__ = make  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Parameter.__new__ = usual  # type: ignore[method-assign]

    @contextmanager
    def guarding(self) -> Iterator[None]:
        """Around code that may compute with ghosts; parameters that it makes are not numbered."""
        with GhostFunctions(self), GhostOperations(self):
            yield

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Around code that looks at shapes, on fake tensors."""
        with GhostReads(self):
            yield

    def numbers_of(self, tensor: Tensor) -> _Numbers:
        """The ghosts that the missing values of `tensor` follow from; none if it has values."""
        storage = storage_of(tensor)
        if storage is None:
            return frozenset()
        known = self._known.get(id(storage))
        return known.numbers if known else frozenset()

    def adopt(self, model: nn.Module, device: torch.device) -> None:
        """Put empty tensors on `device` in the places of those that `model` has on `meta`."""
        made: dict[int, Tensor] = {}
        for module in model.modules():
            for slots in (module._parameters, module._buffers):  # noqa: SLF001
                for name, tensor in slots.items():
                    if tensor is None or not tensor.is_meta:
                        continue
                    if id(tensor) not in made:
                        empty = self._ghost(tensor, frozenset(), device)
                        trains = isinstance(tensor, nn.Parameter)
                        made[id(tensor)] = (
                            nn.Parameter(empty, tensor.requires_grad) if trains else empty
                        )
                    setattr(module, name, made[id(tensor)])

    def want_what_outlives(self) -> None:
        """Add to `wanted` what living tensors other than the parameters themselves depend on.

        Call it when the build is over. One who keeps a tensor (a buffer, a plain attribute) will
        use it, and its values are gone.
        """
        gc.collect()
        own: dict[int, int] = {}
        for parameter in self.parameters:
            storage = storage_of(parameter)
            if storage is not None:
                own[id(storage)] = own.get(id(storage), 0) + 1
        for identity, ghost in self._known.items():
            if _holders(ghost.storage) > 1 + own.get(identity, 0):
                self.wanted |= ghost.numbers - self.keep
        for number in self.keep:
            if number < len(self.parameters) and is_empty(self.parameters[number]):
                self.wanted |= self.numbers_of(self.parameters[number]) - self.keep

    @property
    def draws(self) -> bool:
        """Whether ghosts are filled."""
        return self._draws

    def lacks(self, tensor: Tensor) -> bool:
        """Whether `tensor` has no memory now."""
        storage = storage_of(tensor)
        return storage is not None and storage.nbytes() == 0 and id(storage) in self._known

    def want(self, tensors: Sequence[Tensor]) -> None:
        """Say that code needs values of `tensors`."""
        self.wanted |= self._numbers_of_all(tensors) - self.keep

    def without_memory(self, like: Tensor, sources: Sequence[Tensor]) -> Tensor:
        """An empty tensor whose values would follow from those of `sources`."""
        return self._ghost(like, self._numbers_of_all(sources))

    def lost(self, tensor: Tensor, sources: Sequence[Tensor]) -> None:
        """Say that values of `tensor`, a ghost, would now follow from those of `sources`, too."""
        ghost = self._ghost_of(tensor)
        self._remember(replace(ghost, numbers=ghost.numbers | self._numbers_of_all(sources)))
        if self._hand.pop(id(ghost.storage), None) is not None:
            ghost.storage.resize_(0)

    def data_for(self, parameter: Tensor, value: Tensor) -> Tensor:
        """What `parameter.data = value` shall set: nothing with memory, for a ghost."""
        numbers = self.numbers_of(parameter)
        if not numbers or storage_of(value) is None or self.numbers_of(value):
            return value
        return self._ghost(value, numbers)

    def skip_draw(self) -> None:
        """Say that a ghost took no random numbers though it would have."""
        self._skipped = True

    def drew(self) -> None:
        """Say that something with memory took random numbers."""
        self.drifted |= self._skipped

    def is_whole(self, tensor: Tensor) -> bool:
        """Whether what fills `tensor`, a ghost, fills all of its storage."""
        ghost = self._ghost_of(tensor)
        return tensor.storage_offset() == 0 and tensor.numel() * tensor.itemsize == ghost.size

    def take_in_hand(self, tensor: Tensor) -> None:
        """Give the ghost `tensor` memory until others need it."""
        ghost = self._ghost_of(tensor)
        while self._hand and sum(self._hand.values()) + ghost.size > self._largest:
            self._drop_oldest()
        ghost.storage.resize_(ghost.size)
        self._hand[id(ghost.storage)] = ghost.size

    @contextmanager
    def lent(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Gives ghosts memory inside, for what looks at shapes or writes what nobody reads."""
        ghosts = {id(ghost.storage): ghost for ghost in map(self._ghost_of, tensors)}
        for ghost in ghosts.values():
            ghost.storage.resize_(ghost.size)
        try:
            yield
        finally:
            for ghost in ghosts.values():
                ghost.storage.resize_(0)

    def fill(self, tensor: Tensor) -> None:
        """Give a tensor that is empty memory for good, with nothing in it yet."""
        ghost = self._ghost_of(tensor)
        ghost.storage.resize_(ghost.size)

    def _ghost_of(self, tensor: Tensor) -> _Ghost:
        return self._known[id(tensor.untyped_storage())]

    def _numbers_of_all(self, tensors: Sequence[Tensor]) -> _Numbers:
        return frozenset[int]().union(*map(self.numbers_of, tensors))

    def _drop_oldest(self) -> None:
        identity = next(iter(self._hand))
        del self._hand[identity]
        self._known[identity].storage.resize_(0)
        give_back_free_memory()

    def _ghost(
        self, like: Tensor, numbers: _Numbers, device: torch.device | None = None
    ) -> Tensor:
        made = emptied(like, device)
        self._remember(_Ghost(made.untyped_storage(), bytes_of(made), numbers))
        return made

    def _remember(self, ghost: _Ghost) -> None:
        self._known[id(ghost.storage)] = ghost


def _holders(storage: UntypedStorage) -> int:
    """How many tensors and Python objects hold `storage`."""
    count: int = torch._C._storage_Use_Count(storage._cdata)  # noqa: SLF001
    return count
