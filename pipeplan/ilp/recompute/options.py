"""What a stage may choose: which of its runs to recompute, for every segment of the chain.

An option of layers i..j is (more ns, bytes kept per micro-batch, peak bytes of a running one). It
is found from left to right: a stage's pieces are kept layers and runs, and with P bytes kept
before a piece (what the last layer saves of its output, s, not counted)

    kept layer l:  P' = P + max(s, si_l) + r_l,   s' = so_l,
                   peak = max(P + x_l + r_l + fw_l + y_l,  P' + so_l + bw_l + gy_l + gx_l)   (M3)
    run a..b:      P' = P + x_a,  s' = 0,  peak = P + `segment_peaks`[a, b],  more = its forward.

R is what is left of P if all leaves that can (H1): max(s, si_l) where a kept layer begins a row of
such, nothing of those behind it, and x_a of a run.

Only options that are best at some number of micro-batches in flight are kept, at most `MOST` a
segment. The relaxed options leave out none: each that is dropped lowers, field by field, the
cheaper one that stands for it, so that no choice takes less than one of them. Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pipeplan.chain import Chain
from pipeplan.ilp.offload import byte_options_table
from pipeplan.ilp.offload.byte_options import inner_bytes
from pipeplan.ilp.offload.byte_options_table import ByteOptions
from pipeplan.ilp.recompute.contracted_chain import Segment
from pipeplan.ilp.recompute.segment_peaks import segment_peaks
from pipeplan.ilp.segment_tables import Array
from pipeplan.plan import Stage

MOST = 24
"""Options of a segment that end with a run, and as many that end with a kept layer."""
COUNTS = (1, 2, 3, 4, 6, 9, 14)
"""Micro-batches in flight for which options are compared."""

_FIELDS = 7
_MORE, _KEPT, _PEAK, _SAVED, _STAYS, _PARENT, _BEGIN = range(_FIELDS)
"""Rows of a label: more ns, P, peak, s, R, the label before, the first layer of the last piece."""


NONE = 2**60
"""`more` of an option that is not there."""


@dataclass(frozen=True)
class Labels:
    """Everything found for segments that begin at one layer; label 0 is the empty segment."""

    rows: Array
    is_run: NDArray[np.bool_]
    """Whether the last piece is a run."""
    ends: list[tuple[int, int]]
    """By last layer: the first label and the one behind the last."""
    levels: Array
    """[m, label] -> what of its kept bytes can leave; no rows without offloading."""


@dataclass(frozen=True)
class StageOptions:
    """Options of all segments; `[i, j, n]`, unused ones have `more` = `NONE`."""

    more: Array
    saved: Array
    peak: Array
    levels: Array
    """[m, i, j, n] -> bytes of `saved` that can leave, fewest first; empty without offloading."""
    ids: Array
    """Which label of its first layer each option is."""
    labels: list[Labels] = field(repr=False)
    """Of the segments that begin at each layer."""

    def only(self, stages: Sequence[Stage]) -> StageOptions:
        """The options of these stages' segments alone."""
        more = np.full_like(self.more, NONE)
        for stage in stages:
            more[stage.first, stage.last] = self.more[stage.first, stage.last]
        return replace(self, more=more)

    def runs(self, first: int, last: int, option: int) -> tuple[Segment, ...]:
        """The runs that an option of layers first..last recomputes."""
        labels = self.labels[first]
        label, end = int(self.ids[first, last, option]), last
        found: list[Segment] = []
        while label:
            begin = int(labels.rows[_BEGIN, label])
            if labels.is_run[label]:
                found.append((begin, end))
            label, end = int(labels.rows[_PARENT, label]), begin - 1
        return tuple(reversed(found))


def list_options(
    chain: Chain,
    *,
    relaxed: bool = False,
    offload: bool = False,
    first: Sequence[int] = (),
    go_on: Callable[[], bool] = lambda: True,
) -> StageOptions:
    """The options of every segment of `chain`.

    Args:
        chain: the chain.
        relaxed: whether every choice must take at least what some option says, for bounds; such
            options need not exist. Else each is exact, or a little more at the start of a stage.
            With `offload` too, kept is what stays if all leaves that can.
        offload: whether those count as well that need little with most of it away.
        first: layers whose segments have all their options in any case, found first.
        go_on: whether there is time for all of another layer's; the rest have two, which keep
            everything or recompute everything.
    """
    count, maker = len(chain.layers), _Maker(chain, relaxed, offload)
    none = np.zeros((count, count, 2 * MOST), dtype=np.int64)
    more, saved, peak, ids = none + NONE, none.copy(), none.copy(), none
    levels = np.zeros((byte_options_table.MOST if offload else 0, *none.shape), dtype=np.int64)
    known: dict[int, Labels] = {}
    for start in (*first, *range(count)):
        if start not in known:
            known[start] = maker.from_layer(start, few=len(known) >= len(first) and not go_on())
    found = [known[start] for start in range(count)]
    for start, labels in enumerate(found):
        for last, numbers in enumerate(labels.ends, start=start):
            here, used = labels.rows[:, slice(*numbers)], numbers[1] - numbers[0]
            more[start, last, :used] = here[_MORE]
            least = _STAYS if relaxed and offload else _KEPT
            saved[start, last, :used] = here[least] + here[_SAVED]
            peak[start, last, :used] = here[_PEAK]
            levels[:, start, last, :used] = labels.levels[:, slice(*numbers)]
            ids[start, last, :used] = np.arange(*numbers)
    return StageOptions(more, saved, peak, levels, ids, found)


class _Maker:
    """Finds the options of all segments that begin at one layer."""

    def __init__(self, chain: Chain, relaxed: bool, offload: bool) -> None:
        self.chain = chain
        self.relaxed, self.offload = relaxed, offload
        self.thin = partial(_lowered if relaxed else _best, offload=offload)
        self.peaks = [segment_peaks(chain, held=held) for held in (False, True)]
        times = [layer.forward_ns for layer in chain.layers]
        self.before = np.concatenate([[0], np.cumsum(times)]).astype(np.int64)
        self.source = np.array([chain.input_of(n) for n in range(len(times))], dtype=np.int64)

    def from_layer(self, first: int, *, few: bool = False) -> Labels:
        """All labels of segments from layer `first` on, or a `few`: all kept, all one run."""
        count = len(self.chain.layers)
        size = 1 + 2 * MOST * (count - first)
        rows, is_run = np.zeros((_FIELDS, size), dtype=np.int64), np.zeros(size, dtype=bool)
        place = np.full(size, first, dtype=np.int64)
        # A run keeps nothing of its output: the least that may lie before a stage.
        is_run[0] = self.relaxed
        used, latest = 1, slice(0, 1)
        ends: list[tuple[int, int]] = []
        for last in range(first, count):
            begin = used
            joined = ~is_run[latest] if last > first else is_run[latest] & False
            kept = self.thin(self._keep(rows[:, latest], joined, last, latest.start))
            known = 1 if few else begin
            run = self.thin(self._run(rows[:, :known], place[:known], is_run[:known], last))
            for made in (kept, run):
                new = slice(used, used + made.shape[1])
                rows[:, new], is_run[new], place[new] = made, made is run, last + 1
                used = new.stop
            latest = slice(begin, begin + 1 if few else used)
            ends.append((begin, used))
        levels = np.zeros((0, used), dtype=np.int64)
        if self.offload:
            levels = self._levels(rows[_PARENT, :used], is_run[:used], first, ends)
        return Labels(rows[:, :used], is_run[:used], ends, levels)

    def _levels(
        self, parent: Array, is_run: NDArray[np.bool_], first: int, ends: list[tuple[int, int]]
    ) -> Array:
        """What labels of segments from layer `first` on can offload."""
        lists = ByteOptions.empty(len(parent))
        for last, numbers in enumerate(ends, start=first):
            new = slice(*numbers)
            before = lists.at(parent[new])
            inner = inner_bytes(self.chain, last) if last else 0
            kept = before.kept(self.chain.layers[last].saved_bytes, inner)
            stopped = before.stopped()
            lists.stays[:, new] = np.where(is_run[new], stopped.stays, kept.stays)
            lists.leaves[:, new] = np.where(is_run[new], stopped.leaves, kept.leaves)
        return lists.all()

    def _keep(self, old: Array, joined: NDArray[np.bool_], layer: int, offset: int) -> Array:
        """Labels behind `old`, the first of which is label `offset`, when `layer` is kept.

        Where it is `joined` to a kept layer, what lies between them may leave with them.
        """
        one, size = self.chain.layers[layer], self.chain.input_of(layer)
        new = np.empty_like(old)
        running = size + one.saved_bytes + one.forward_workspace_bytes + one.output_bytes
        gradients = one.gradient_of_output_bytes + self.chain.gradient_of_input(layer)
        back = one.saved_output_bytes + one.backward_workspace_bytes + gradients
        new[_MORE] = old[_MORE]
        entry = np.maximum(old[_SAVED], one.saved_input_bytes)
        new[_KEPT] = old[_KEPT] + entry + one.saved_bytes
        new[_STAYS] = old[_STAYS] + np.where(joined, 0, entry)
        new[_PEAK] = np.maximum(old[_PEAK], np.maximum(old[_KEPT] + running, new[_KEPT] + back))
        new[_SAVED] = one.saved_output_bytes
        new[_PARENT] = offset + np.arange(old.shape[1])
        new[_BEGIN] = layer
        return new

    def _run(self, old: Array, place: Array, is_run: NDArray[np.bool_], last: int) -> Array:
        """Labels behind `old`, which end before layers `place`, when all up to `last` is a run.

        The layer before a stage may hold its output, on this GPU or another: assume it does.
        """
        new = np.empty_like(old)
        peaks = np.where(is_run, self.peaks[0][place, last], self.peaks[1][place, last])
        new[_MORE] = old[_MORE] + self.before[last + 1] - self.before[place]
        new[_KEPT] = old[_KEPT] + self.source[place]
        new[_PEAK] = np.maximum(old[_PEAK], old[_KEPT] + peaks)
        new[_SAVED] = 0
        new[_STAYS] = old[_STAYS] + self.source[place]
        new[_PARENT] = np.arange(old.shape[1])
        new[_BEGIN] = place
        return new


def _best(labels: Array, offload: bool) -> Array:
    """Those that are the cheapest of their memory for some count, at most `MOST` of them."""
    labels = _ordered(labels)
    chosen: Array = labels[:, _good(labels, offload)]
    return chosen


def _lowered(labels: Array, offload: bool) -> Array:
    """As many as `_best` keeps, each with the least of all up to the next one in every field."""
    labels = _ordered(labels)
    lowered: Array = np.minimum.reduceat(labels, _good(labels, offload), axis=1)
    return lowered


def _ordered(labels: Array) -> Array:
    """Cheapest first."""
    ordered: Array = labels[:, np.lexsort((labels[_PEAK], labels[_KEPT], labels[_MORE]))]
    return ordered


def _good(labels: Array, offload: bool) -> NDArray[np.intp]:
    """Which of the ordered labels are worth keeping; the first one always is.

    With `offload` also those that need little when two micro-batches are here and the others away.
    """
    good = np.zeros(labels.shape[1], dtype=bool)
    needs = [(count - 1) * labels[_KEPT] + labels[_PEAK] for count in COUNTS]
    if offload:
        needs += [
            need - (count - 2) * (labels[_KEPT] - labels[_STAYS])
            for count, need in zip(COUNTS, needs, strict=True)
            if count > 2
        ]
    for need in needs:
        least = np.minimum.accumulate(need)
        steps = np.flatnonzero(need < np.concatenate([[np.iinfo(np.int64).max], least[:-1]]))
        if len(steps) > MOST // 2:
            steps = steps[np.linspace(0, len(steps) - 1, MOST // 2).round().astype(np.int64)]
        good[steps] = True
    kept = np.flatnonzero(good)
    if len(kept) > MOST:
        kept = kept[np.linspace(0, len(kept) - 1, MOST).round().astype(np.int64)]
    return kept
