"""What a stage may choose: which of its runs to recompute, for every segment of the chain.

An option of layers i..j is (more ns, bytes kept per micro-batch, peak bytes of a running one). It
is found from left to right: a stage's pieces are kept layers and runs, and with P bytes kept
before a piece (what the last layer saves of its output, s, not counted)

    kept layer l:  P' = P + max(s, si_l) + r_l,   s' = so_l,
                   peak = max(P + x_l + r_l + fw_l + y_l,  P' + so_l + bw_l + gy_l + gx_l)   (M3)
    run a..b:      P' = P + x_a,  s' = 0,  peak = P + `segment_peaks`[a, b],  more = its forward.
    option of l:   as a kept layer, with what the option says in place of the layer (V5).

R is what is left of P if all leaves that can (H1): max(s, si_l) where a kept layer begins a row of
such, nothing of those behind it, and x_a of a run.

Only options that are best at some number of micro-batches in flight are kept, at most `MOST` a
segment. The relaxed options leave out none: each that is dropped lowers, field by field, the
cheaper one that stands for it, so that no choice takes less than one of them. Source: ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from pipeplan.chain import Chain, Layer
from pipeplan.ilp.offload import byte_options_table
from pipeplan.ilp.offload.byte_options import inner_bytes
from pipeplan.ilp.offload.byte_options_table import ByteOptions
from pipeplan.ilp.recompute.labels import (
    BEGIN,
    FIELDS,
    KEEPS,
    KEPT,
    MORE,
    MOST,
    PARENT,
    PEAK,
    RUNS,
    SAVED,
    STAYS,
    Labels,
    best,
    lowered,
)
from pipeplan.ilp.recompute.segment_peaks import segment_peaks
from pipeplan.ilp.runs import Run, Runs
from pipeplan.ilp.segment_tables import Array
from pipeplan.plan import Stage

NONE = 2**60
"""`more` of an option that is not there."""


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

    def runs(self, first: int, last: int, option: int) -> Runs:
        """The runs that an option of layers first..last recomputes."""
        labels = self.labels[first]
        label, end = int(self.ids[first, last, option]), last
        found: list[Run] = []
        while label:
            begin, kind = int(labels.rows[BEGIN, label]), int(labels.kind[label])
            if kind != KEEPS:
                found.append(Run(begin, end, None if kind == RUNS else kind))
            label, end = int(labels.rows[PARENT, label]), begin - 1
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
    none = np.zeros((count, count, maker.groups * MOST), dtype=np.int64)
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
            more[start, last, :used] = here[MORE]
            least = STAYS if relaxed and offload else KEPT
            saved[start, last, :used] = here[least] + here[SAVED]
            peak[start, last, :used] = here[PEAK]
            levels[:, start, last, :used] = labels.levels[:, slice(*numbers)]
            ids[start, last, :used] = np.arange(*numbers)
    return StageOptions(more, saved, peak, levels, ids, found)


class _Maker:
    """Finds the options of all segments that begin at one layer."""

    def __init__(self, chain: Chain, relaxed: bool, offload: bool) -> None:
        self.chain = chain
        self.relaxed, self.offload = relaxed, offload
        self.groups = 3 if any(layer.options for layer in chain.layers) else 2
        self.thin = partial(lowered if relaxed else best, offload=offload)
        self.peaks = np.stack([segment_peaks(chain, held) for held in _saved_outputs(chain)])
        times = [layer.forward_ns for layer in chain.layers]
        self.before = np.concatenate([[0], np.cumsum(times)]).astype(np.int64)
        self.source = np.array([chain.input_of(n) for n in range(len(times))], dtype=np.int64)

    def from_layer(self, first: int, *, few: bool = False) -> Labels:
        """All labels of segments from layer `first` on, or a `few`: all kept, all one run."""
        count = len(self.chain.layers)
        size = 1 + self.groups * MOST * (count - first)
        rows, kind = np.zeros((FIELDS, size), dtype=np.int64), np.zeros(size, dtype=np.int8)
        place = np.full(size, first, dtype=np.int64)
        # A run keeps nothing of its output: the least that may lie before a stage.
        kind[0] = RUNS if self.relaxed else KEEPS
        used, latest = 1, slice(0, 1)
        ends: list[tuple[int, int]] = []
        for last in range(first, count):
            begin = used
            joined = (kind[latest] == KEEPS) & (last > first)
            layer, old, offset = self.chain.layers[last], rows[:, latest], latest.start
            known = 1 if few else begin
            groups = [
                [(KEEPS, self._keep(old, joined, last, layer, offset))],
                [(RUNS, self._run(rows[:, :known], place[:known], kind[:known], last))],
            ]
            if layer.options and not few:
                groups.append(list(self._under(old, last, layer, offset)))
            for group in groups:
                kinds = np.concatenate([np.full(made.shape[1], of) for of, made in group])
                made, order = self.thin(np.concatenate([made for _, made in group], axis=1))
                new = slice(used, used + made.shape[1])
                rows[:, new], kind[new], place[new] = made, kinds[order], last + 1
                used = new.stop
            latest = slice(begin, begin + 1 if few else used)
            ends.append((begin, used))
        levels = np.zeros((0, used), dtype=np.int64)
        if self.offload:
            levels = self._levels(rows[PARENT, :used], kind[:used], first, ends)
        return Labels(rows[:, :used], kind[:used], ends, levels)

    def _levels(
        self, parent: Array, kind: NDArray[np.int8], first: int, ends: list[tuple[int, int]]
    ) -> Array:
        """What labels of segments from layer `first` on can offload."""
        lists = ByteOptions.empty(len(parent))
        for last, numbers in enumerate(ends, start=first):
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
        new[MORE] = old[MORE]
        entry = np.maximum(old[SAVED], one.saved_input_bytes)
        new[KEPT] = old[KEPT] + entry + one.saved_bytes
        new[STAYS] = old[STAYS] + np.where(joined, 0, entry)
        new[PEAK] = np.maximum(old[PEAK], np.maximum(old[KEPT] + running, new[KEPT] + back))
        new[SAVED] = one.saved_output_bytes
        new[PARENT] = offset + np.arange(old.shape[1])
        new[BEGIN] = layer
        return new

    def _run(self, old: Array, place: Array, kind: NDArray[np.int8], last: int) -> Array:
        """Labels behind `old`, which end before layers `place`, when all up to `last` is a run.

        The layer before a stage may hold its output, on this GPU or another: assume it does.
        """
        new = np.empty_like(old)
        # A relaxed label may stand for another option, which saves less of its output.
        ahead = np.where(kind >= 0, RUNS, kind) if self.relaxed else kind
        peaks = self.peaks[ahead, place, last]
        new[MORE] = old[MORE] + self.before[last + 1] - self.before[place]
        new[KEPT] = old[KEPT] + self.source[place]
        new[PEAK] = np.maximum(old[PEAK], old[KEPT] + peaks)
        new[SAVED] = 0
        new[STAYS] = old[STAYS] + self.source[place]
        new[PARENT] = np.arange(old.shape[1])
        new[BEGIN] = place
        return new


def _saved_outputs(chain: Chain) -> list[list[int]]:
    """What layers save of their output, by kind of piece: options first, then runs and layers."""
    layers = chain.layers
    options = [
        [layer.options[n].saved_output_bytes if n < len(layer.options) else 0 for layer in layers]
        for n in range(max(len(layer.options) for layer in layers))
    ]
    return [*options, [0] * len(layers), [layer.saved_output_bytes for layer in layers]]
