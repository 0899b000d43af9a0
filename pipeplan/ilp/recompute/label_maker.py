"""Labels of all segments that begin at one layer: pieces put behind each other (`options`).

Layers that are alike give segments that are alike: their labels are made once (`alike`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeplan.chain import Chain, Layer
from pipeplan.ilp.offload.byte_options import inner_bytes
from pipeplan.ilp.offload.byte_options_table import ByteOptions
from pipeplan.ilp.recompute.alike import AlikeLayers
from pipeplan.ilp.recompute.labels import (
    BEGIN,
    FIELDS,
    KEEPS,
    KEPT,
    MORE,
    MOST,
    NESTED,
    PARENT,
    RUNS,
    Figures,
    Labels,
    NestedTables,
    RunTables,
    keep,
    kept_behind,
    run_behind,
    sort_in,
)
from pipeplan.ilp.recompute.nested import Nested
from pipeplan.ilp.recompute.segment_peaks import saved_outputs, segment_peaks
from pipeplan.ilp.segment_tables import Array

_NONE = np.zeros((0, 1, 1), dtype=np.int64)
NOT_NESTED: NestedTables = _NONE, _NONE, _NONE, np.zeros((1, 1), int), np.zeros((1, 1), int)
"""Where no run holds another."""


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
        self.order = np.zeros(size, dtype=np.int64)
        """Labels in the order of what runs behind them cost."""
        self.latest = slice(0, 1)
        """Labels that the next layer extends."""
        self.ends: list[tuple[int, int]] = []

    def add(self, count: int, kind: NDArray[np.int8], last: int) -> None:
        """So many labels that end with layer `last` stand behind the others."""
        new = slice(self.used, self.used + count)
        self.kind[new], self.place[new] = kind, last + 1
        self.used = new.stop

    def begin_as(self, other: Labels, source: int, count: int, runs: RunTables) -> None:
        """Take the labels of `count` layers from layer `source` on, which are like the first."""
        self.ends = list(other.ends[:count])
        self.used = self.ends[-1][1]
        known = slice(1, self.used)
        self.rows[:, known], self.kind[known] = other.rows[:, known], other.kind[known]
        self.rows[BEGIN, known] -= source - self.first
        for last, numbers in enumerate(self.ends, start=self.first):
            self.place[slice(*numbers)] = last + 1
        self.latest = slice(*self.ends[-1])
        place, every = self.place[: self.used], self.rows[:, : self.used]
        before, inputs = runs[0][place], runs[1][np.minimum(place, len(runs[1]) - 1)]
        self.order[: self.used] = np.lexsort((every[KEPT] + inputs, every[MORE] - before))

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
        held = saved_outputs(chain)
        self.alike = AlikeLayers(chain, held)
        self._made: dict[int, Labels] = {}
        self._every = True
        """Whether no layer before had a few labels only: copies would name labels it lacks."""
        both = np.stack([segment_peaks(chain, each) for each in held], axis=1)
        times = [layer.forward_ns for layer in chain.layers]
        before = np.concatenate([[0], np.cumsum(times)]).astype(np.int64)
        source = np.array([chain.input_of(n) for n in range(len(times))], dtype=np.int64)
        self._runs = before, source, np.ascontiguousarray(both[0]), both[1, 0].copy()
        self.nested: Nested | None = None
        if nested:
            self.nested = Nested(chain, np.array(held, dtype=np.int64), relaxed=relaxed)
        self._figures = [self._all_figures(number) for number in range(len(times))]
        ways = 1 + (self.nested.most if self.nested else 0)
        most = ways * (1 + self.most * len(times))
        self._found = np.zeros((FIELDS, most), dtype=np.int64)
        self._kinds, self._chosen = np.zeros(most, dtype=np.int8), np.zeros(most, dtype=np.int64)

    def _all_figures(self, number: int) -> list[Figures]:
        """Of a layer that keeps all, then of its options."""
        own = self.chain.layers[number]
        made = [self._layer_figures(number, own, 0, under=False)]
        for option in own.options:
            more = option.forward_ns + option.backward_ns - own.forward_ns - own.backward_ns
            made.append(self._layer_figures(number, own.under(option), more, under=True))
        return made

    def _layer_figures(self, number: int, one: Layer, more: int, *, under: bool) -> Figures:
        gradients = one.gradient_of_output_bytes + self.chain.gradient_of_input(number)
        return (
            self.chain.input_of(number),
            one.saved_input_bytes,
            one.saved_bytes,
            one.saved_output_bytes,
            one.forward_workspace_bytes + one.output_bytes,
            one.backward_workspace_bytes + gradients,
            more,
            int(under),
        )

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
            made.begin_as(self._made[source], source, alike, self._runs)
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
        """Add the labels of the segment that ends with layer `last`.

        Groups of them are thinned apart: by kind of the last piece, then by whether runs hold
        others.
        """
        begin, latest = made.used, made.latest
        known = made.order[: 1 if few else begin]
        pieces = [(KEEPS,), (RUNS,), tuple(range(len(self._figures[last]) - 1))]
        for kinds in pieces[: 2 if few else 3]:
            alike = made.used
            for holding, most in ((False, MOST), (True, self.holding)):
                if kinds == (RUNS,):
                    count = self._behind_run(made, known, last, holding)
                else:
                    count = self._behind_kept(made, latest, last, kinds, holding)
                if count and most:
                    in_order = kinds == (RUNS,) and not holding
                    self._keep(made, count, most, last, in_order=in_order)
            if self.nested:  # what a run may hold is known before it is a piece itself
                new = slice(alike, made.used)
                self.nested.add(made.first, last, alike, made.rows[:, new], made.kind[new])
        made.latest = slice(begin, begin + 1 if few else made.used)
        made.ends.append((begin, made.used))
        if last + 1 < len(self._figures) and not few:
            sort_in(made.order, begin, made.used - begin, made.rows, made.place, self._runs)

    def _behind_kept(
        self, made: _Growing, latest: slice, last: int, kinds: tuple[int, ...], holding: bool
    ) -> int:
        """Find labels of which the last piece is layer `last`, in one of the ways `kinds`."""
        rows, first = made.rows[:, latest], made.first
        joined = (made.kind[latest] == KEEPS) & (last > first)
        if self.relaxed and last == first:
            joined |= True  # the input of a first layer may leave as well
        count = 0
        for kind in kinds:
            # Nothing of a layer under an option may leave.
            beside = joined if kind == KEEPS else np.zeros_like(joined)
            figures = self._figures[last][kind + 1]
            found = self._found[:, count:]
            new = kept_behind(rows, beside, figures, latest.start, last, holding, found)
            self._kinds[count : count + new] = kind
            count += new
        return count

    def _behind_run(self, made: _Growing, known: Array, last: int, holding: bool) -> int:
        """Find labels of which the last piece is a run that ends with layer `last`.

        The layer before a stage may hold its output, on this GPU or another: assume it does.
        """
        nested = self.nested.tables if self.nested else NOT_NESTED
        count = run_behind(
            made.rows,
            np.arange(len(known)) if holding else known,
            made.place,
            made.kind,
            last,
            self.relaxed,
            self._runs,
            nested,
            holding,
            self._found,
        )
        self._kinds[:count] = RUNS
        return count

    def _keep(self, made: _Growing, count: int, most: int, last: int, *, in_order: bool) -> None:
        """Add those of `count` labels that were found that are worth it."""
        rows, chosen = made.rows[:, made.used :], self._chosen
        used = keep(self._found, count, most, self.offload, self.relaxed, in_order, rows, chosen)
        made.add(used, self._kinds[chosen[:used]], last)

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
