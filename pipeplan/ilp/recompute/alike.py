"""Layers with the same figures: segments of them have the same options, which are listed once.

Most networks repeat blocks. Source: ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from pipeplan.chain import Chain, Layer, LayerOption
from pipeplan.ilp.segment_tables import Array

OWN: Final = tuple(Layer.model_fields.keys() - {"name", "parameters", "options"})
OPTION: Final = tuple(LayerOption.model_fields.keys() - {"program"})


class AlikeLayers:
    """How many layers from one on are as those from another one on."""

    def __init__(self, chain: Chain, held: Sequence[Sequence[int]]) -> None:
        """Compare all layers.

        Args:
            chain: the chain.
            held: [kind][l] what layer l saves of its output (`saved_outputs`).
        """
        numbers: dict[object, int] = {}
        count = len(chain.layers)
        same = [numbers.setdefault(_figures(chain, n), len(numbers)) for n in range(count)]
        self._before = [tuple(kind[n - 1] for kind in held) if n else None for n in range(count)]
        self._common: Array = np.zeros((count + 1, count + 1), dtype=np.int64)
        for one in reversed(range(count)):
            equal = np.array(same) == same[one]
            self._common[one, :-1] = equal * (1 + self._common[one + 1, 1:])

    def of(self, first: int) -> tuple[int, int]:
        """The layer behind `first` from where most layers are alike, and how many; or 0."""
        later = range(first + 1, len(self._before))
        fits = (n for n in later if self._before[n] == self._before[first])
        source = max(fits, key=lambda n: int(self._common[first, n]), default=first)
        return source, int(self._common[first, source]) if source > first else 0


def _figures(chain: Chain, index: int) -> object:
    """All that options of segments are made of, of one layer; but what the one before saves."""
    layer = chain.layers[index]
    return (
        tuple(getattr(layer, name) for name in OWN),
        tuple(tuple(getattr(option, name) for name in OPTION) for option in layer.options),
        chain.input_of(index),
        chain.gradient_of_input(index),
    )
