"""What a caching allocator takes beyond the tensors: rounding, and scratch inside operations.

A chain's bytes are those of tensors. CUDA's allocator rounds each of them up, and kernels take
scratch memory that no tensor shows; both are told apart from the chain's bytes, for the margin
that a plan's memory needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

Statistics = Callable[[], Mapping[str, int]]
"""Counters as `torch.cuda.memory_stats` names them."""


@dataclass(frozen=True, slots=True)
class AllocatorOverhead:
    """Bytes beyond those of tensors while some work ran, at their worst."""

    rounding: int = 0
    """What the allocator added to the sizes it was asked for."""
    scratch: int = 0
    """What was asked for beyond the tensors that operations returned."""

    def worst(self, other: AllocatorOverhead) -> AllocatorOverhead:
        """The larger of both, part by part."""
        return AllocatorOverhead(
            max(self.rounding, other.rounding), max(self.scratch, other.scratch)
        )


class AllocatorWatch:
    """While entered, follows an allocator's counters."""

    def __init__(self, statistics: Statistics, reset: Callable[[], None]) -> None:
        """Watches what `statistics` counts; `reset` sets its peaks to the present values."""
        self._statistics = statistics
        self._reset = reset
        self._asked = self._given = 0
        self._before: Mapping[str, int] = {}

    @classmethod
    def of(cls, device: torch.device) -> AllocatorWatch:
        """The watch of torch's allocator on a CUDA device."""
        return cls(
            lambda: torch.cuda.memory_stats(device),
            lambda: torch.cuda.reset_peak_memory_stats(device),
        )

    def __enter__(self) -> Self:
        """Begins."""
        self._reset()
        self._before = dict(self._statistics())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        place: TracebackType | None,
    ) -> None:
        """Ends."""
        after = self._statistics()
        self._asked = after[f"{_ASKED}.peak"] - self._before.get(f"{_ASKED}.current", 0)
        self._given = after[f"{_GIVEN}.peak"] - self._before.get(f"{_GIVEN}.current", 0)

    def overhead(self, tensor_bytes: int) -> AllocatorOverhead:
        """What was taken beyond `tensor_bytes`, the most that new tensors held at once."""
        return AllocatorOverhead(
            rounding=max(0, self._given - self._asked),
            scratch=max(0, self._asked - tensor_bytes),
        )


_ASKED = "requested_bytes.all"
_GIVEN = "allocated_bytes.all"
