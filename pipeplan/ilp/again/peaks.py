"""What every run of layers needs at its peak, all runs at once."""

from __future__ import annotations

import numpy as np

from pipeplan.chain import Chain
from pipeplan.ilp.tables import Array


def run_peaks(chain: Chain, *, held: bool) -> Array:
    """[a, b] -> bytes at once of the run a..b beside what lies before its input.

    The most of its first forward (V3), its second forward and its backward (V4), the input
    included; -1 below the diagonal.

    Args:
        chain: the chain.
        held: whether the layer before each run keeps its output as usual, else nothing of it.
    """
    count = len(chain.layers)
    peaks = np.full((count, count), -1, dtype=np.int64)
    for first in range(count):
        before = chain.layers[first - 1].saved_output_bytes if held and first else 0
        peaks[first, first:] = _from(chain, first, before)
    return peaks


def _from(chain: Chain, first: int, before: int) -> list[int]:
    """The peaks of the runs that begin at `first`: maxima that grow with their last layer."""
    source = chain.input_of(first)
    kept = max(chain.layers[first].saved_input_bytes, before)
    past = saved = light = going = back = 0
    peaks = []
    for index in range(first, len(chain.layers)):
        layer, size = chain.layers[index], chain.input_of(index)
        saved += layer.saved_bytes
        running = size + layer.forward_workspace_bytes + layer.output_bytes
        light = max(light, (source if index > first else 0) + layer.saved_bytes + running)
        going = max(going, past + saved + running)
        gradients = layer.gradient_of_output_bytes + chain.gradient_of_input(index)
        own = layer.saved_output_bytes + layer.backward_workspace_bytes + gradients
        back = max(back, kept + saved + own)
        ends = source + layer.gradient_of_output_bytes + chain.gradient_of_input(first)
        peaks.append(max(light, ends, layer.gradient_of_output_bytes + going, back))
        if index + 1 < len(chain.layers):
            past = kept
            entry = chain.layers[index + 1].saved_input_bytes
            kept += max(layer.saved_output_bytes, entry)
    return peaks
