"""Peak bytes of every segment of layers while it is recomputed, all segments at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeplan.chain import Chain
from pipeplan.ilp.segment_bytes import run_peaks
from pipeplan.ilp.segment_tables import Array


def segment_peaks(chain: Chain, held: Sequence[int]) -> Array:
    """[0, a, b] -> bytes at once of the run a..b beside what lies before its input.

    The most of its first forward (V3), its second forward and its backward (V4), the input
    included; [1, a, b] is that of its first forward alone. -1 below the diagonal.

    Args:
        chain: the chain.
        held: what each layer saves of its output, where a run follows it.
    """
    count = len(chain.layers)
    peaks = np.full((2, count, count), -1, dtype=np.int64)
    for first in range(count):
        before = held[first - 1] if first else 0
        for last, (light, recomputing) in enumerate(run_peaks(chain, first, before), start=first):
            ends = chain.input_of(first) + chain.gradient_of_input(first)
            ends += chain.layers[last].gradient_of_output_bytes
            peaks[:, first, last] = max(light, ends, recomputing), light
    return peaks


def saved_outputs(chain: Chain) -> list[list[int]]:
    """What layers save of their output, by kind of piece: options first, then runs and layers."""
    layers = chain.layers
    options = [
        [layer.options[n].saved_output_bytes if n < len(layer.options) else 0 for layer in layers]
        for n in range(max(len(layer.options) for layer in layers))
    ]
    return [*options, [0] * len(layers), [layer.saved_output_bytes for layer in layers]]
