"""Peak bytes of every segment of layers while it is recomputed, all segments at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from pipeplan.chain import Chain
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
        for last, (light, recomputing) in enumerate(peaks_from(chain, first, before), start=first):
            ends = chain.input_of(first) + chain.gradient_of_input(first)
            ends += chain.layers[last].gradient_of_output_bytes
            peaks[:, first, last] = max(light, ends, recomputing), light
    return peaks


def peaks_from(chain: Chain, first: int, held: int) -> Iterator[tuple[int, int]]:
    """Bytes at once of the runs that begin at `first`, by their last layer, input included.

    Yields the most of the first forward, and of the second one with the backward: what (V3) and
    (V4) take the run's ends from. Maxima that grow with the last layer.

    Args:
        chain: the chain.
        first: first layer of the runs.
        held: what the layer before saves of their input.
    """
    source = chain.input_of(first)
    kept = max(chain.layers[first].saved_input_bytes, held)
    past = saved = light = going = back = copied = 0
    for index in range(first, len(chain.layers)):
        layer, size = chain.layers[index], chain.input_of(index)
        if index > first:
            past = kept
            kept += max(chain.layers[index - 1].saved_output_bytes, layer.saved_input_bytes)
        saved += layer.saved_bytes
        around, keeping = size + layer.output_bytes, source if index > first else 0
        light = max(light, keeping + around + layer.light_workspace_bytes)
        going = max(going, past + saved + around + layer.forward_workspace_bytes)
        gradients = layer.gradient_of_output_bytes + chain.gradient_of_input(index)
        own = layer.saved_output_bytes + layer.backward_workspace_bytes + gradients
        back = max(back, kept + saved + own)
        copied += layer.buffer_bytes
        yield light, max(layer.gradient_of_output_bytes + going + copied, back)


def saved_outputs(chain: Chain) -> list[list[int]]:
    """What layers save of their output, by kind of piece: options first, then runs and layers."""
    layers = chain.layers
    options = [
        [layer.options[n].saved_output_bytes if n < len(layer.options) else 0 for layer in layers]
        for n in range(max(len(layer.options) for layer in layers))
    ]
    return [*options, [0] * len(layers), [layer.saved_output_bytes for layer in layers]]
