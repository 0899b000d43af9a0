"""Links of a plan's cluster for messages that carry tensors, emulated at the sender.

The sender keeps one clock per directed pair of ranks: a message leaves when it is sent and the
link is free, arrives its planned duration (T3) later, and that moment travels with it; the
receiver waits for it. Accounting at the receiver would be wrong as soon as two boundaries share a
link: it takes messages in the order in which it needs them, not in the order they were sent. Under
half duplex each direction is counted by itself.

Source: ours. Both ends must share one clock, so all ranks must be on one machine.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pipeplan.runtime.dry_run.clock import RankClock
from pipeplan.runtime.dry_run.timed_links import STAMP_TAGS
from pipeplan.runtime.transport.base import Pending, Transport, WrappedTransport


class EmulatedTransport(WrappedTransport):
    """Sends every message through a link that takes its time."""

    def __init__(
        self, transport: Transport, clock: RankClock, durations: Mapping[int, int]
    ) -> None:
        """Wraps a transport.

        Args:
            transport: what really moves the messages.
            clock: shared by all ranks.
            durations: ns by tag; a tag without one is not delayed.
        """
        super().__init__(transport)
        self._clock = clock
        self._durations = durations
        self._free: dict[int, int] = {}
        """By peer, when the link there has carried everything sent so far."""

    def send(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """See `Transport`; complete when the link has carried it."""
        carried = self._transport.send(tensor, peer, tag)
        duration = self._durations.get(tag)
        if duration is None:
            return carried
        end = max(self._clock.now(), self._free.get(peer, 0)) + duration
        self._free[peer] = end
        stamp = torch.tensor([end])
        return Stamped(
            carried, self._transport.send(stamp, peer, STAMP_TAGS + tag), stamp, self._clock
        )

    def receive(self, tensor: Tensor, peer: int, tag: int) -> Pending:
        """See `Transport`; complete when the link has carried it."""
        carried = self._transport.receive(tensor, peer, tag)
        if tag not in self._durations:
            return carried
        stamp = torch.zeros(1, dtype=torch.int64)
        return Stamped(
            carried, self._transport.receive(stamp, peer, STAMP_TAGS + tag), stamp, self._clock
        )


class Stamped:
    """A message and the stamp that says when it has arrived."""

    def __init__(
        self, carried: Pending, stamped: Pending, stamp: Tensor, clock: RankClock
    ) -> None:
        self._parts = (stamped, carried)
        self._stamp = stamp
        self._clock = clock

    def wait(self) -> None:
        """See `Pending`."""
        for part in self._parts:
            part.wait()
        self._clock.until(int(self._stamp))
