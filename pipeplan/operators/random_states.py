"""Random operations that run more than once draw the same numbers each time.

Before its first run the state of the device's generator is kept. Each later run begins with it,
and behind it the generator goes on where it was.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class RandomStates:
    """Of one pass: the states of generators before operations that run again."""

    def __init__(self, again: frozenset[int]) -> None:
        """Keeps states for the operations `again` alone, as each takes some kilobytes."""
        self._again = again
        self._before: dict[int, Tensor] = {}

    @contextmanager
    def of(self, operation: int, device: torch.device) -> Iterator[None]:
        """Around a run of a random `operation` on `device`."""
        before = self._before.get(operation)
        if before is None:
            if operation in self._again:
                self._before[operation] = _state(device)
            yield
            return
        now = _state(device)
        _restore(before, device)
        try:
            yield
        finally:
            _restore(now, device)


def _state(device: torch.device) -> Tensor:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.default_generator.get_state()


def _restore(state: Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.default_generator.set_state(state)
