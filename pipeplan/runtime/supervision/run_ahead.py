"""How far the process may be ahead of its GPU: so many computes, then it waits for the oldest.

A GPU is given work faster than it does it. Unbounded, the process would take host memory for data
long before their time, and hear of a lost peer, a signal or a timeout when everything is over. It
waits by asking again and again, never inside of CUDA, which would not return while a message of a
dead peer is missing. Nothing waits here that the list of actions does not: a process that is ahead
by nothing is what (O6) was checked for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from pipeplan.program import Action
from pipeplan.runtime.transport.base import PeerLostError
from pipeplan.units import format_ns

COMPUTES = 4
"""Work for the GPU while the process prepares the next; the list says what lives meanwhile."""
_LOOK_S = 2e-5


class Event(Protocol):
    """A mark in the GPU's stream."""

    def query(self) -> bool:
        """Whether the GPU has come so far."""


class RunAhead:
    """One rank's lead over its GPU."""

    def __init__(
        self,
        mark: Callable[[], Event | None],
        gone: Callable[[], str] = lambda: "",
        timeout_ns: int = 0,
        computes: int = COMPUTES,
    ) -> None:
        """Begins with nothing under way.

        Args:
            mark: puts an event behind all that the GPU was given; None where nobody is ahead.
            gone: who of the ranks is known to be gone; empty for nobody.
            timeout_ns: longest wait for one event; 0 for any time.
            computes: how many may be under way.
        """
        self._mark = mark
        self._gone = gone
        self._timeout_ns = timeout_ns
        self._computes = computes
        self._marks: deque[tuple[Action, Event]] = deque()
        self.missing: Action | None = None
        """What the GPU has not ended and this process waits for."""

    @classmethod
    def of(
        cls, device: torch.device, gone: Callable[[], str] = lambda: "", timeout_ns: int = 0
    ) -> RunAhead:
        """For what is computed on `device`; see `__init__`."""
        return cls(lambda: _event(device), gone, timeout_ns)

    def computed(self, action: Action) -> None:
        """Say that the GPU was given `action`; return once it is not too far behind.

        Raises:
            PeerLostError: if a rank is gone, or the GPU does not go on.
        """
        event = self._mark()
        if event is not None:
            self._marks.append((action, event))
            self._drain(self._computes)

    def drain(self) -> None:
        """Return once the GPU has done all.

        Raises:
            PeerLostError: as `computed`.
        """
        self._drain(0)

    def _drain(self, left: int) -> None:
        while len(self._marks) > left:
            self.missing, event = self._marks[0]
            self.settle(event)
            self._marks.popleft()
        self.missing = None

    def settle(self, event: Event) -> None:
        """Return once `event` has come.

        Raises:
            PeerLostError: as `computed`.
        """
        begin = time.monotonic_ns()
        while not event.query():
            if gone := self._gone():
                raise PeerLostError(gone)
            if self._timeout_ns and time.monotonic_ns() - begin > self._timeout_ns:
                raise PeerLostError(f"the GPU did not go on for {format_ns(self._timeout_ns)}")
            time.sleep(_LOOK_S)

    def read(self, tensor: Tensor) -> Tensor:
        """`tensor` on the host, once the GPU has computed it."""
        if not tensor.is_cuda:
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        event = _event(tensor.device)
        assert event is not None
        self.settle(event)
        return host


def _event(device: torch.device) -> Event | None:
    if device.type != "cuda":
        return None
    event: Event = torch.cuda.current_stream(device).record_event()
    return event
