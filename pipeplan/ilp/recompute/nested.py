"""Runs of layers that hold runs: what each is when it is computed again.

With an option of layers a..b (`options`) in place of all that is kept, the second forward of the
run a..b keeps less, and takes as much longer as that option says; (V4) of the peaks of its
forward, f, and of both, p:

    more = the run's forward + the option's more
    peak = max(p, gy_b + f + buffers)       (with what the run has beside that anyway)

Runs inside end before the run does: one at its end would run again at once. Source: Rotor
(chapter 2.1.2 of X. Zhao, *Optimizing Memory Usage when Training Deep Neural Networks* (2024)),
where such a run is a subproblem of its own.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from pipeplan.chain import Chain
from pipeplan.ilp.recompute.labels import AHEAD, KEEPS, MORE, PEAK, UNDER, NestedTables
from pipeplan.ilp.recompute.segment_peaks import segment_peaks
from pipeplan.ilp.segment_tables import Array

ABOVE: Final = 2**60
"""Bytes that no peak reaches."""
WAYS: Final = (2, 4)
"""In which a run may hold others; for bounds the second number: fewer would weaken them."""


class Nested:
    """[n, a, b] -> the ways in which the run a..b may hold others: more, peak, label."""

    def __init__(self, chain: Chain, held: Array, *, relaxed: bool) -> None:
        """Begin with none.

        Args:
            chain: the chain.
            held: [kind, l] what layer l saves of its output, the most of all kinds last.
            relaxed: whether each way must be dominated by one of those that are kept, for bounds.
        """
        count = len(chain.layers)
        self.relaxed, self.most = relaxed, WAYS[relaxed]
        shape = (self.most, count, count)
        self._more = np.full(shape, -1, dtype=np.int64)
        self._peak, self._label = np.zeros_like(self._more), np.zeros_like(self._more)
        behind = np.array([layer.gradient_of_output_bytes for layer in chain.layers])
        buffers = np.cumsum([0, *(layer.buffer_bytes for layer in chain.layers)])
        self._beside = behind[None, :] + buffers[None, 1:] - buffers[:-1, None]
        entries = np.array([layer.saved_input_bytes for layer in chain.layers])
        before = np.concatenate([np.zeros((len(held), 1), dtype=np.int64), held[:, :-1]], axis=1)
        self._entry = np.maximum(0, before - entries) * (not relaxed)
        ends = [chain.input_of(n) + chain.gradient_of_input(n) for n in range(count)]
        self._flat, light = segment_peaks(chain, held[-1].tolist())
        self._least = np.maximum(light, np.array(ends)[:, None] + behind[None, :])

    @property
    def tables(self) -> NestedTables:
        """What labels behind such runs are made of."""
        return self._more, self._peak, self._label, self._entry, self._least

    def begin_as(self, first: int, source: int, count: int) -> None:
        """The runs of up to `count` layers from `first` on are those from layer `source` on."""
        ours, theirs = slice(first, first + count), slice(source, source + count)
        for table in (self._more, self._peak, self._label):
            table[:, first, ours] = table[:, source, theirs]

    def add(
        self, first: int, last: int, begin: int, labels: Array, kind: NDArray[np.int8]
    ) -> None:
        """What the run first..last may be by labels of that segment, the first of them `begin`."""
        here = np.flatnonzero((kind == KEEPS) & (labels[UNDER] == 0))
        here = here[np.argsort(labels[MORE, here], kind="stable")]
        more = labels[MORE, here]
        again = labels[AHEAD, here] + self._beside[first, last]
        peak = np.maximum(labels[PEAK, here], again)
        above = ABOVE if self.relaxed else self._flat[first, last] - self._entry[-1, first]
        good = np.flatnonzero(peak < np.minimum.accumulate([above, *peak])[:-1])
        if len(good) > self.most:
            good = good[np.linspace(0, len(good) - 1, self.most).round().astype(np.int64)]
        if not len(good):
            return
        used = slice(len(good)), first, last
        self._label[used] = begin + here[good]
        if self.relaxed:
            more, peak = (np.minimum.reduceat(each, good) for each in (more, peak))
        else:
            more, peak = more[good], peak[good]
        self._more[used], self._peak[used] = more, peak
