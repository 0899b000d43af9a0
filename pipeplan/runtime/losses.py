"""Losses on their way to the observer: from a GPU once per step, not once per micro-batch.

Reading a number waits until the GPU has computed it. So a step's losses gather on the GPU and
leave together behind the step's last forward; they are read at its update, when the backward
behind that forward still keeps the GPU busy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Told = Callable[[int, float], None]
"""Hears micro-batch and loss, in the order of the micro-batches."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """The losses of one step on their way to the host."""

    first: int
    host: Tensor
    there: Any
    """An event behind the copy; None on the processor."""


class Losses:
    """One run's losses on the rank that computes them."""

    def __init__(
        self,
        microbatches: int,
        told: Told,
        together: Callable[[Tensor], bool] = lambda loss: loss.is_cuda,
        settle: Callable[[Any], None] | None = None,
    ) -> None:
        """Holds nothing yet.

        Args:
            microbatches: per step; each step's come in order.
            told: hears every loss, at the latest in `tell`.
            together: whether a loss waits for those of its step; otherwise it is told at once.
            settle: returns once an event of a GPU has come; None: there is none.
        """
        self._size = microbatches
        self._told = told
        self._together = together
        self._settle = settle
        self._step: Tensor | None = None
        """The losses of the open step, where they were computed."""
        self._sent: deque[_Sent] = deque()

    def add(self, microbatch: int, loss: Tensor) -> None:
        """Take the loss of one micro-batch; it is not kept."""
        if not self._together(loss):
            self._told(microbatch, float(loss.item()))
            return
        if self._step is None:
            self._step = loss.new_empty(self._size)
        place = microbatch % self._size
        self._step[place].copy_(loss)
        if place == self._size - 1:
            self._send(microbatch - place, self._step)

    def _send(self, first: int, losses: Tensor) -> None:
        cuda = losses.is_cuda
        host = torch.empty_like(losses, device="cpu", pin_memory=cuda)
        host.copy_(losses, non_blocking=True)
        there = torch.cuda.current_stream(losses.device).record_event() if cuda else None
        self._sent.append(_Sent(first, host, there))

    def tell(self) -> None:
        """Tell the losses of all steps whose forwards are over."""
        while self._sent:
            sent = self._sent.popleft()
            if sent.there is not None and self._settle is not None:
                self._settle(sent.there)
            for number, value in enumerate(sent.host.tolist(), sent.first):
                self._told(number, value)
