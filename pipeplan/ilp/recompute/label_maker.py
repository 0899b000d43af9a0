"""Labels of all segments that begin at one layer: pieces put behind each other (`options`).

Layers that are alike give segments that are alike: their labels are made once (`alike`).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pipeplan.chain import Chain, Layer
from pipeplan.ilp.offload.byte_options import inner_bytes
from pipeplan.ilp.offload.byte_options_table import ByteOptions
from pipeplan.ilp.recompute.alike import AlikeLayers
from pipeplan.ilp.recompute.labels import (
    AHEAD,
    BEGIN,
    FIELDS,
    HOLDS,
    INNER,
    KEEPS,
    KEPT,
    MORE,
    MOST,
    NESTED,
    PARENT,
    PEAK,
    RUNS,
    SAVED,
    STAYS,
    UNDER,
    Labels,
    apart,
    best,
    lowered,
)
from pipeplan.ilp.recompute.nested import Nested
from pipeplan.ilp.recompute.segment_peaks import saved_outputs, segment_peaks
from pipeplan.ilp.segment_tables import Array


class _Growing:
    """Labels of segments that begin at one layer, as far as they are known."""

    def __init__(self, first: int, size: int, empty: int) -> None:
        """The empty segment alone, as a piece of the kind `empty`; room for `size` labels."""
        self.first, self.used = first, 1
        self.rows = np.zeros((FIELDS, size), dtype=np.int64)
        self.kind = np.zeros(size, dtype=np.int8)
        self.kind[0] = empty
        self.place = np.full(size, first, dtype=np.int64)
        """The layer behind each."""
        self.latest = slice(0, 1)
        """Labels that the next layer extends."""
        self.ends: list[tuple[int, int]] = []

    def add(self, rows: Array, kind: NDArray[np.int8], last: int) -> None:
        """Add labels that end with layer `last`."""
        new = slice(self.used, self.used + rows.shape[1])
        self.rows[:, new], self.kind[new], self.place[new] = rows, kind, last + 1
        self.used = new.stop

    def begin_as(self, other: Labels, source: int, count: int) -> None:
        """Take the labels of `count` layers from layer `source` on, which are like the first."""
        self.ends = list(other.ends[:count])
        self.used = self.ends[-1][1]
        known = slice(1, self.used)
        self.rows[:, known], self.kind[known] = other.rows[:, known], other.kind[known]
        self.rows[BEGIN, known] -= source - self.first
        for last, numbers in enumerate(self.ends, start=self.first):
            self.place[slice(*numbers)] = last + 1
        self.latest = slice(*self.ends[-1])

    def labels(self, levels: Array) -> Labels:
        """All of them."""
        return Labels(self.rows[:, : self.used], self.kind[: self.used], self.ends, levels)


class LabelMaker:
    """Finds the options of all segments that begin at one layer."""

    def __init__(self, chain: Chain, relaxed: bool, offload: bool, nested: bool) -> None:
        self.chain = chain
        self.relaxed, self.offload = relaxed, offload
        groups = 3 if any(layer.options for layer in chain.layers) else 2
        self.holding = NESTED[relaxed] * nested
        self.most = groups * (MOST + self.holding)
        """Labels of a segment."""
        self.thin = partial(lowered if relaxed else best, offload=offload)
        held = saved_outputs(chain)
        self.alike = AlikeLayers(chain, held)
        self._made: dict[int, Labels] = {}
        self._every = True
        """Whether no layer before had a few labels only: copies would name labels it lacks."""
        both = np.stack([segment_peaks(chain, each) for each in held], axis=1)
        self.peaks, self.light = both[0], both[1, 0]
        self.nested: Nested | None = None
        if nested:
            self.nested = Nested(chain, np.array(held, dtype=np.int64), relaxed=relaxed)
        times = [layer.forward_ns for layer in chain.layers]
        self.before = np.concatenate([[0], np.cumsum(times)]).astype(np.int64)
        self.source = np.array([chain.input_of(n) for n in range(len(times))], dtype=np.int64)

    def from_layer(self, first: int, *, few: bool = False) -> Labels:
        """All labels of segments from layer `first` on, or a `few`: all kept, all one run.

        Layers behind `first` come first.
        """
        count = len(self.chain.layers)
        # A run keeps nothing of its output: the least that may lie before a stage.
        empty = RUNS if self.relaxed else KEEPS
        made = _Growing(first, 1 + self.most * (count - first), empty)
        self._every &= not few
        source, alike = self.alike.of(first) if self._every else (first, 0)
        if alike:
            made.begin_as(self._made[source], source, alike)
            if self.nested:
                self.nested.begin_as(first, source, alike)
        for last in range(first + alike, count):
            self._extend(made, last, few=few)
        levels = np.zeros((0, made.used), dtype=np.int64)
        if self.offload:
            levels = self._levels(made)
        self._made[first] = made.labels(levels)
        return self._made[first]

    def _extend(self, made: _Growing, last: int, *, few: bool) -> None:
        """Add the labels of the segment that ends with layer `last`."""
        first, begin, latest = made.first, made.used, made.latest
        joined = (made.kind[latest] == KEEPS) & (last > first)
        if self.relaxed and last == first > 0:
            joined |= True  # the input of a kept first layer may leave as well
        before = made.rows[:, latest], joined, latest.start
        known = 1 if few else begin
        places = made.rows[:, :known], made.place[:known], made.kind[:known]
        for group in self._groups(last, before, places, few=few):
            alike = made.used
            for kinds, labels, most in apart(group, self.holding):
                chosen, order = self.thin(labels, most)
                made.add(chosen, kinds[order], last)
            if self.nested:  # what a run may hold is known before it is a piece itself
                new = slice(alike, made.used)
                self.nested.add(first, last, alike, made.rows[:, new], made.kind[new])
        made.latest = slice(begin, begin + 1 if few else made.used)
        made.ends.append((begin, made.used))

    def _groups(
        self,
        last: int,
        before: tuple[Array, NDArray[np.bool_], int],
        places: tuple[Array, Array, NDArray[np.int8]],
        *,
        few: bool,
    ) -> Iterator[list[tuple[int, Array]]]:
        """By kind of the last piece, which ends with layer `last`: each is made when asked for.

        Args:
            last: the layer.
            before: labels that end right before it, which of them are joined to it, the first.
            places: labels that a run may follow, where each ends, its kind.
            few: whether layers' options are left out.
        """
        layer = self.chain.layers[last]
        old, joined, offset = before
        yield [(KEEPS, self._keep(old, joined, last, layer, offset))]
        yield [(RUNS, self._run(*places, last))]
        if layer.options and not few:
            yield list(self._under(old, last, layer, offset))

    def _levels(self, made: _Growing) -> Array:
        """What the labels can offload."""
        parent, kind = made.rows[PARENT, : made.used], made.kind[: made.used]
        lists = ByteOptions.empty(len(parent))
        for last, numbers in enumerate(made.ends, start=made.first):
            new = slice(*numbers)
            before = lists.at(parent[new])
            inner = inner_bytes(self.chain, last) if last else 0
            kept = before.kept(self.chain.layers[last].saved_bytes, inner)
            stopped = before.stopped()
            joins = kind[new] == KEEPS
            lists.stays[:, new] = np.where(joins, kept.stays, stopped.stays)
            lists.leaves[:, new] = np.where(joins, kept.leaves, stopped.leaves)
        return lists.all()

    def _under(
        self, old: Array, last: int, own: Layer, offset: int
    ) -> Iterator[tuple[int, Array]]:
        """As `_keep`, under each of the layer's options; nothing of it may leave."""
        alone = np.zeros(old.shape[1], dtype=bool)
        for number, option in enumerate(own.options):
            new = self._keep(old, alone, last, own.under(option), offset)
            new[MORE] += option.forward_ns + option.backward_ns - own.forward_ns - own.backward_ns
            new[UNDER] += 1
            yield number, new

    def _keep(
        self, old: Array, joined: NDArray[np.bool_], layer: int, one: Layer, offset: int
    ) -> Array:
        """Labels behind `old`, the first of which is `offset`, when `layer` runs as `one`.

        Where it is `joined` to a kept layer, what lies between them may leave with them.
        """
        size = self.chain.input_of(layer)
        new = np.empty_like(old)
        running = size + one.saved_bytes + one.forward_workspace_bytes + one.output_bytes
        gradients = one.gradient_of_output_bytes + self.chain.gradient_of_input(layer)
        back = one.saved_output_bytes + one.backward_workspace_bytes + gradients
        new[MORE], new[UNDER], new[HOLDS], new[INNER] = old[MORE], old[UNDER], old[HOLDS], 0
        entry = np.maximum(old[SAVED], one.saved_input_bytes)
        new[KEPT] = old[KEPT] + entry + one.saved_bytes
        new[STAYS] = old[STAYS] + np.where(joined, 0, entry)
        new[AHEAD] = np.maximum(old[AHEAD], old[KEPT] + running)
        new[PEAK] = np.maximum(old[PEAK], np.maximum(new[AHEAD], new[KEPT] + back))
        new[SAVED] = one.saved_output_bytes
        new[PARENT] = offset + np.arange(old.shape[1])
        new[BEGIN] = layer
        return new

    def _run(self, old: Array, place: Array, kind: NDArray[np.int8], last: int) -> Array:
        """Labels behind `old`, which end before layers `place`, when all up to `last` is a run.

        The layer before a stage may hold its output, on this GPU or another: assume it does.
        """
        # A relaxed label may stand for another option, which saves less of its output.
        ahead = np.where(kind >= 0, RUNS, kind) if self.relaxed else kind
        plain = self._contracted(old, np.arange(old.shape[1]), place, last)
        plain[PEAK] = np.maximum(old[PEAK], old[KEPT] + self.peaks[ahead, place, last])
        made = [plain]
        for here, more, peak, inner in self.nested.of(last, place, ahead) if self.nested else ():
            new = self._contracted(old[:, here], here, place[here], last)
            new[MORE] += more
            new[PEAK] = np.maximum(old[PEAK, here], old[KEPT, here] + peak)
            new[INNER] = inner
            new[HOLDS] += 1
            made.append(new)
        return np.concatenate(made, axis=1)

    def _contracted(self, old: Array, parent: Array, place: Array, last: int) -> Array:
        """As `_run`, without the peak."""
        new = np.zeros_like(old)
        source = self.source[place]
        new[MORE] = old[MORE] + self.before[last + 1] - self.before[place]
        new[KEPT] = old[KEPT] + source
        new[AHEAD] = np.maximum(old[AHEAD], old[KEPT] + self.light[place, last])
        new[STAYS] = old[STAYS] + source
        new[UNDER], new[HOLDS] = old[UNDER], old[HOLDS]
        new[PARENT], new[BEGIN] = parent, place
        return new
