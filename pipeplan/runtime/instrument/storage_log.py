"""Every storage of a sampled step: when it came, when it went, in the order of what happened.

Recording costs one entry of a list per storage that comes or goes; what each one was for is found
out afterwards (`attribution`), when it is known how long it lived.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipeplan.livebytes import LiveBytes, dense, key
from pipeplan.memory_terms import Key, Purpose
from pipeplan.program import Action

Change = tuple[int, int]
"""Name of a storage, how many bytes it has more or fewer. Names of dead ones come again."""


@dataclass(slots=True)
class Performed:
    """An action: where in the changes it began and ended, and when, in ns."""

    action: Action
    begin: int
    begin_ns: int
    end: int = -1
    end_ns: int = -1


@dataclass(frozen=True, slots=True)
class HandedOn:
    """Tensors that a stage made and that wait for their message, or for the next stage."""

    purpose: Purpose
    stage: int
    microbatch: int
    place: int
    """In the changes."""
    names: tuple[int, ...]
    shared: tuple[bool, ...]
    """Whether anything else referred to the storage then, such as a graph."""


@dataclass(slots=True)
class States:
    """Purpose and stage of what lived for the whole run, by name; `place` in the changes."""

    place: int
    owners: dict[int, tuple[Purpose, int]]


@dataclass(slots=True)
class StorageSample:
    """What was recorded of one step, and of the actions before it that reach into it."""

    step: int
    changes: list[Change] = field(default_factory=list)
    before: States = field(default_factory=lambda: States(-1, {}))
    """Before the first action."""
    settled: States = field(default_factory=lambda: States(-1, {}))
    """Before the step itself: the state of optimizers came meanwhile."""
    actions: list[Performed] = field(default_factory=list)
    handed: list[HandedOn] = field(default_factory=list)
    host: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    """(stage, bytes) of each micro-batch on the host, whenever one more is there."""
    on_host: Sequence[Key] = ()
    """States that are there all the time."""
    first: int = 0
    """The first action of the step itself."""


class StorageLog(LiveBytes):
    """Live bytes, which keep a list of all changes while a sample is open."""

    def __init__(self) -> None:
        super().__init__()
        self._changes: list[Change] | None = None

    @property
    def place(self) -> int:
        """How many changes there are."""
        return len(self._changes or ())

    def open(self, sample: StorageSample) -> None:
        """Write into `sample` from now on; what is counted already comes first."""
        with self._lock:
            sample.changes.extend(item for item in self._sizes.items() if item[1])
            self._changes = sample.changes

    def close(self) -> None:
        """Write nothing more."""
        with self._lock:
            self._changes = None

    def _changed(self, name: int, difference: int) -> None:
        super()._changed(name, difference)
        if self._changes is not None and difference:
            self._changes.append((name, difference))


def shared(tensors: Sequence[Tensor]) -> tuple[bool, ...]:
    """Whether storages have more references than from `tensors`, one entry as of `names`.

    Each tensor is one, and so is the Python object of a storage. torch has no public name for it.
    """
    parts = [part for tensor in tensors for part in dense(tensor)]
    known = Counter(map(key, parts))
    uses = torch._C._storage_Use_Count  # noqa: SLF001
    return tuple(
        uses(part.untyped_storage()._cdata) > known[key(part)] + 1  # noqa: SLF001
        for part in parts
    )


def names(tensors: Iterable[Tensor]) -> tuple[int, ...]:
    """Of the storages behind `tensors`, as they are now."""
    return tuple(key(part) for tensor in tensors for part in dense(tensor))
