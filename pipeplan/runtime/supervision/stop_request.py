"""Whether one rank wants to stop: a signal, or nothing."""

from __future__ import annotations

import threading
from typing import Protocol


class StopRequest(Protocol):
    """Whether a rank wants to stop."""

    def wanted(self, seconds: float) -> bool:
        """Whether it does, after `seconds` at most."""

    def wake(self) -> None:
        """Let `wanted` return at once."""


class NoRequest:
    """A rank that never wants to stop by itself."""

    def __init__(self) -> None:
        self._woken = threading.Event()

    def wanted(self, seconds: float) -> bool:
        """See `StopRequest`."""
        self._woken.wait(seconds)
        return False

    def wake(self) -> None:
        """See `StopRequest`."""
        self._woken.set()
