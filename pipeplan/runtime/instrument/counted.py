"""A run under live-byte counting: what a rank holds, to set against what its plan says.

Only what the memory model speaks of is counted (docs/reference/model.md, section 4): states, saved
tensors, working tensors, messages. Making the data and voting are no part of it.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pipeplan.livebytes import LiveBytes
from pipeplan.runtime.data.feed import Feed
from pipeplan.runtime.transport.base import Pending, Transport, WrappedTransport


class CountedFeed:
    """Counts each input and target from when a stage gets it, not what was used to make it."""

    def __init__(self, feed: Feed, live: LiveBytes) -> None:
        self._feed = feed
        self._live = live

    def input(self, microbatch: int) -> list[Tensor]:
        """See `Feed`."""
        if self._live.idle:
            return self._feed.input(microbatch)
        with self._live.paused():
            tensors = self._feed.input(microbatch)
        self._live.count(tensors)
        return tensors

    def target(self, microbatch: int) -> Tensor:
        """See `Feed`."""
        if self._live.idle:
            return self._feed.target(microbatch)
        with self._live.paused():
            tensor = self._feed.target(microbatch)
        self._live.count([tensor])
        return tensor


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
