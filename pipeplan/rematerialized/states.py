"""Random numbers and buffers: a forward that runs again sees what the first one saw.

The generators and the buffers are left as the first forward left them: the caller's stream of
random numbers and running statistics are those of the plain module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from pipeplan.layout import overwrite
from pipeplan.rematerialized.parts import Buffer

Generators = list[Tensor]
"""The state of the processor's generator, and of the device's."""


class ForwardStates:
    """What each layer saw in its first forward, for the layers that run again."""

    def __init__(self, device: torch.device, again: Mapping[int, tuple[Buffer, ...]]) -> None:
        """Takes what to watch.

        Args:
            device: where the layers run.
            again: layers that run more than once -> the buffers that their forward changes.
        """
        self._device = device
        self._again = again
        self._drawn: dict[int, Generators] = {}
        self._buffers: dict[int, list[Tensor]] = {}

    @contextmanager
    def of(self, layer: int) -> Iterator[None]:
        """Around a forward of `layer`."""
        if layer not in self._again:
            yield
        elif layer in self._buffers:
            with self._as_before(layer):
                yield
        else:
            before = self._generators()
            self._buffers[layer] = [each.tensor.clone() for each in self._again[layer]]
            yield
            pairs = zip(before, self._generators(), strict=True)
            if not all(torch.equal(first, second) for first, second in pairs):
                self._drawn[layer] = before

    @contextmanager
    def _as_before(self, layer: int) -> Iterator[None]:
        buffers = [each.tensor for each in self._again[layer]]
        drawn = self._drawn.get(layer)
        now, present = [buffer.clone() for buffer in buffers], self._generators() if drawn else []
        self._put(buffers, self._buffers[layer])
        if drawn:
            self._restore(drawn)
        try:
            yield
        finally:
            self._put(buffers, now)
            if drawn:
                self._restore(present)

    def _put(self, buffers: list[Tensor], values: list[Tensor]) -> None:
        # Through `data`: no graph uses the value of a statistic that its forward changed.
        for buffer, value in zip(buffers, values, strict=True):
            overwrite(buffer, value)

    def _generators(self) -> Generators:
        states = [torch.get_rng_state()]
        if self._device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._device))
        return states

    def _restore(self, states: Generators) -> None:
        torch.set_rng_state(states[0])
        if self._device.type == "cuda":
            torch.cuda.set_rng_state(states[1], self._device)
