"""Whether layers that are computed again give what they gave the first time.

Their first forward leaves no graph, so `torch.is_grad_enabled()` is False in it, as under
torch.utils.checkpoint with `use_reentrant=True`; and it is one call more. A layer that asks for
either would be trained on a forward that never was. The first micro-batch of a run is compared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipeplan.errors import InputError


class SecondForward:
    """What the first forward of one micro-batch gave, until that micro-batch is computed again."""

    def __init__(self, layers: str) -> None:
        """Takes the names of the layers, for messages."""
        self._layers = layers
        self._microbatch: int | None = None
        self._sizes: list[tuple[float, float, float]] = []

    def made(self, microbatch: int, outputs: Sequence[Tensor]) -> None:
        """The first forward of `microbatch` has made `outputs`."""
        if self._microbatch is None:
            self._microbatch, self._sizes = microbatch, _sizes(outputs)

    def check(self, microbatch: int, outputs: Sequence[Tensor]) -> None:
        """Compare with what comes of `microbatch` now, if it is the one.

        Raises:
            InputError: if the outputs are others by more than rounding.
        """
        if microbatch != self._microbatch:
            return
        for (total, size, unit), (now, other, _) in zip(self._sizes, _sizes(outputs), strict=True):
            if max(abs(total - now), abs(size - other)) > unit**0.5 * max(size, other):
                raise InputError(
                    f"task: {self._layers}: got other outputs when computed again for the backward"
                    f" (sum of magnitudes {other:.6g}, {size:.6g} in the first forward), need the"
                    " same but for rounding. A layer may ask torch.is_grad_enabled(), which is off"
                    " in the first forward, or count its calls. Let it do the same in both, or"
                    " plan without --recompute."
                )


def _sizes(outputs: Sequence[Tensor]) -> list[tuple[float, float, float]]:
    """Of each tensor of real numbers its sum, the sum of its magnitudes, its unit of rounding.

    Numbers of 8 bits are left out: torch has no sums of them, and rounding is most of them.
    """
    with torch.no_grad():
        return [
            (
                each.sum(dtype=torch.float64).item(),
                torch.linalg.vector_norm(each, 1, dtype=torch.float64).item(),
                torch.finfo(each.dtype).eps,
            )
            for each in outputs
            if each.is_floating_point() and each.itemsize > 1
        ]
