"""SIGINT, SIGTERM and SIGUSR1 as a wish to stop at the next step boundary."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from pipeplan.batching import STOP_SIGNALS

REPEATS_S = 2.0
"""How long signals behind the first one are the same wish."""


class StopSignal:
    """A signal as a wish to stop at the next step boundary; one behind `REPEATS_S` ends at once.

    SIGINT, SIGTERM, or SIGUSR1, which schedulers send some time before they end a job. One wish
    may come several times: who ends a job signals all its processes, and torchrun, one of them,
    forwards the signal to its ranks within milliseconds.

    Python calls a handler only between two of the main thread's own steps, which a long operation
    or a wait for a message delays. So the signal's number comes through a socket, to a thread that
    can also end the process.
    """

    NAMES = STOP_SIGNALS

    def __init__(self, repeats_s: float = REPEATS_S) -> None:
        """Listens to nothing yet; `repeats_s`: see `REPEATS_S`."""
        self.number: int | None = None
        self._repeats_s = repeats_s
        self._woken = threading.Event()

    def wanted(self, seconds: float) -> bool:
        """Whether a signal has come, after `seconds` at most."""
        self._woken.wait(seconds)
        if self.number is None:
            self._woken.clear()
        return self.number is not None

    def wake(self) -> None:
        """Let `wanted` return at once."""
        self._woken.set()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catches the signals inside."""
        said, heard = socket.socketpair()
        said.setblocking(False)
        thread = threading.Thread(target=self._hear, args=(heard,), daemon=True)
        thread.start()
        fd = signal.set_wakeup_fd(said.fileno(), warn_on_full_buffer=False)
        before = [signal.signal(name, lambda *_: None) for name in self.NAMES]
        try:
            yield
        finally:
            for name, handler in zip(self.NAMES, before, strict=True):
                signal.signal(name, handler)
            signal.set_wakeup_fd(fd)
            said.shutdown(socket.SHUT_RDWR)  # forked processes may have it, too
            thread.join()
            said.close()
            heard.close()

    def _hear(self, heard: socket.socket) -> None:
        """Notes the first signal, ends the process on a late one; until the other end is shut."""
        first_s = 0.0
        while numbers := heard.recv(64):
            for number in numbers:
                if number not in self.NAMES:
                    continue
                now_s = time.monotonic()
                if self.number is None:
                    self.number, first_s = number, now_s
                    self._woken.set()
                elif now_s - first_s > self._repeats_s:
                    os._exit(128 + number)
