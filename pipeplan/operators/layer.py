"""A layer of a chain as a graph of operators: captured as a stage calls it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pipeplan.operators.capture import capture
from pipeplan.operators.captured import Captured
from pipeplan.precision import casting


def capture_layer(
    layer: nn.Module, values: Sequence[Tensor], autocast: torch.dtype | None
) -> Captured:
    """The operations of a layer whose stage gives its inputs away.

    `profile` and `launch` both call this, so that a program of the one is one of the other.

    Args:
        layer: in the mode that it trains in.
        values: the boundary before it and what it is fed; those that enter require a gradient.
        autocast: as `Task.autocast`.

    Raises:
        UncapturableError: names what no graph can hold.
    """
    with torch.enable_grad(), casting(autocast, values[0].device):
        return capture(layer, *values).with_own_inputs()
