"""A run under live-byte counting: what a rank holds, to set against what its plan says.

Only what the memory model speaks of is counted (docs/reference/model.md, section 4): states, saved
tensors, working tensors, messages. Making the data and voting are no part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from pipeplan.livebytes import LiveBytes
from pipeplan.nested import tensors_in
from pipeplan.runtime.data.feed import Feed
from pipeplan.runtime.transport.base import Pending, Transport, WrappedTransport

_Value = TypeVar("_Value")


class CountedFeed:
    """Counts each input and target from when a stage gets it, not what was used to make it."""

    def __init__(self, feed: Feed, live: LiveBytes) -> None:
        self._feed = feed
        self._live = live

    def input(self, microbatch: int) -> list[Tensor]:
        """See `Feed`."""
        return self._counted(lambda: self._feed.input(microbatch))

    def fed(self, microbatch: int, places: Sequence[int]) -> list[Tensor]:
        """See `Feed`."""
        return self._counted(lambda: self._feed.fed(microbatch, places))

    def target(self, microbatch: int) -> Any:
        """See `Feed`."""
        return self._counted(lambda: self._feed.target(microbatch))

    def _counted(self, get: Callable[[], _Value]) -> _Value:
        if self._live.idle:
            return get()
        with self._live.paused():
            value = get()
        self._live.count(tensors_in(value))
        return value


class CountedTransport(WrappedTransport):
    """What moves messages is not counted; the executor's tensors that they carry are."""

    def __init__(self, transport: Transport, live: LiveBytes) -> None:
        super().__init__(transport)
        self._live = live

    def send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """See `Transport`."""
        if self._live.idle:
            return super().send(tensor, peer, tag)
        with self._live.paused():
            return super().send(tensor, peer, tag)

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """See `Transport`."""
        if self._live.idle:
            return super().receive(tensor, peer, tag)
        with self._live.paused():
            return super().receive(tensor, peer, tag)

    def flush(self) -> None:
        """See `Transport`."""
        with self._live.paused():
            super().flush()

    def gather(self, value: object) -> list[Any]:
        """See `Transport`."""
        if self._live.idle:
            return super().gather(value)
        with self._live.paused():
            return super().gather(value)
