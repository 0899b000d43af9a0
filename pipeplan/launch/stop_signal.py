"""SIGINT, SIGTERM and SIGUSR1 as a wish to stop at the next step boundary."""

from __future__ import annotations

import select
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopSignal:
    """A signal as a wish to stop at the next step boundary; a second one kills.

    SIGINT, SIGTERM, or SIGUSR1, which schedulers send some time before they end a job. Python
    calls a handler only between two of the main thread's own steps, which a long operation or a
    wait for a message delays. So the signal's number also comes through a socket, at once.
    """

    NAMES = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)

    def __init__(self) -> None:
        self.number: int | None = None
        self._said, self._heard = socket.socketpair()
        for end in (self._said, self._heard):
            end.setblocking(False)

    def wanted(self, seconds: float) -> bool:
        """Whether a signal has come, after `seconds` at most."""
        if self.number is None and select.select([self._heard], [], [], seconds)[0]:
            caught = [number for number in self._heard.recv(64) if number in self.NAMES]
            self.number = self.number or (caught[0] if caught else None)
        return self.number is not None

    def wake(self) -> None:
        """Let `wanted` return at once."""
        self._said.send(bytes(1))

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catches the signals inside."""
        before = [signal.signal(name, self._note) for name in self.NAMES]
        fd = signal.set_wakeup_fd(self._said.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(fd)
            for name, handler in zip(self.NAMES, before, strict=True):
                signal.signal(name, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.number = number
        signal.signal(number, signal.SIG_DFL)
