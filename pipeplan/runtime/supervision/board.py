"""Where ranks write for all to read."""

from __future__ import annotations

from typing import Protocol

from torch.distributed.distributed_c10d import Store


class Board(Protocol):
    """Where ranks write for all to read."""

    def offer(self, name: str, text: str) -> None:
        """Write `text` under `name`, if nobody has."""

    def read(self, name: str) -> str | None:
        """What is written under `name`, if anything is."""


class StoreBoard:
    """A board in the ranks' store."""

    def __init__(self, store: Store) -> None:
        """Takes a store that nothing else uses."""
        self._store = store

    def offer(self, name: str, text: str) -> None:
        """See `Board`."""
        self._store.compare_set(name, "", text)

    def read(self, name: str) -> str | None:
        """See `Board`."""
        return self._store.get(name).decode() if self._store.check([name]) else None


class LocalBoard:
    """A board for the ranks of one process."""

    def __init__(self) -> None:
        """Nothing is written."""
        self._texts: dict[str, str] = {}

    def offer(self, name: str, text: str) -> None:
        """See `Board`."""
        self._texts.setdefault(name, text)

    def read(self, name: str) -> str | None:
        """See `Board`."""
        return self._texts.get(name)
