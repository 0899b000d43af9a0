"""What a stage may choose: which of its runs to recompute, for every segment of the chain.

An option of layers i..j is (more ns, bytes kept per micro-batch, peak bytes of a running one). It
is found from left to right: a stage's pieces are kept layers and runs, and with P bytes kept
before a piece (what the last layer saves of its output, s, not counted)

    kept layer l:  P' = P + max(s, si_l) + r_l,   s' = so_l,
                   peak = max(P + x_l + r_l + fw_l + y_l,  P' + so_l + bw_l + gy_l + gx_l)   (M3)
    run a..b:      P' = P + x_a,  s' = 0,  peak = P + `segment_peaks`[a, b],  more = its forward.
    option of l:   as a kept layer, with what the option says in place of the layer (V5).

A run may hold runs (`nested`): what it is when it is computed again is an option of a..b itself,
so that the layers from behind come first. As in Rotor, such a run takes longer and needs less at
once.

R is what is left of P if all leaves that can (H1): max(s, si_l) where a kept layer begins a row of
such, nothing of those behind it, and x_a of a run. For bounds the input of a stage leaves, too.

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
    NONE,
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
from pipeplan.ilp.runs import Run, Runs
from pipeplan.ilp.segment_tables import Array
from pipeplan.plan import Stage


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
        return self._behind(first, last, int(self.ids[first, last, option]))

    def _behind(self, first: int, last: int, label: int) -> Runs:
        """The runs that a label of layers first..last stands for."""
        labels, end = self.labels[first], last
        found: list[Run] = []
        while label:
            begin, kind = int(labels.rows[BEGIN, label]), int(labels.kind[label])
            if kind == RUNS:
                inner = self._behind(begin, end, int(labels.rows[INNER, label]))
                found.append(Run(begin, end, inner=inner))
            elif kind != KEEPS:
                found.append(Run(begin, end, kind))
            label, end = int(labels.rows[PARENT, label]), begin - 1
        return tuple(reversed(found))


def list_options(
    chain: Chain,
    *,
    relaxed: bool = False,
    offload: bool = False,
    nested: bool = False,
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
        nested: whether runs may hold runs: they need less at once, and take several times as long
            to list.
        first: layers whose segments have all their options in any case.
        go_on: whether there is time for all of another layer's; the rest have two, which keep
            everything or recompute everything.
    """
    count, maker = len(chain.layers), _Maker(chain, relaxed, offload, nested)
    none = np.zeros((count, count, maker.most), dtype=np.int64)
    more, saved, peak, ids = none + NONE, none.copy(), none.copy(), none
    levels = np.zeros((byte_options_table.MOST if offload else 0, *none.shape), dtype=np.int64)
    found: list[Labels] = []
    for start in reversed(range(count)):
        found.insert(0, maker.from_layer(start, few=start not in first and not go_on()))
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

    def __init__(self, chain: Chain, relaxed: bool, offload: bool, nested: bool) -> None:
        self.chain = chain
        self.relaxed, self.offload = relaxed, offload
        groups = 3 if any(layer.options for layer in chain.layers) else 2
        self.holding = NESTED[relaxed] * nested
        self.most = groups * (MOST + self.holding)
        """Labels of a segment."""
        self.thin = partial(lowered if relaxed else best, offload=offload)
        held = saved_outputs(chain)
        both = np.stack([segment_peaks(chain, each) for each in held], axis=1)
        self.peaks, self.light = both[0], both[1, 0]
        self.nested: Nested | None = None
        if nested:
            self.nested = Nested(chain, np.array(held, dtype=np.int64), relaxed=relaxed)
        times = [layer.forward_ns for layer in chain.layers]
        self.before = np.concatenate([[0], np.cumsum(times)]).astype(np.int64)
        self.source = np.array([chain.input_of(n) for n in range(len(times))], dtype=np.int64)

    def from_layer(self, first: int, *, few: bool = False) -> Labels:
        """All labels of segments from layer `first` on, or a `few`: all kept, all one run."""
        count = len(self.chain.layers)
        size = 1 + self.most * (count - first)
        rows, kind = np.zeros((FIELDS, size), dtype=np.int64), np.zeros(size, dtype=np.int8)
        place = np.full(size, first, dtype=np.int64)
        # A run keeps nothing of its output: the least that may lie before a stage.
        kind[0] = RUNS if self.relaxed else KEEPS
        used, latest = 1, slice(0, 1)
        ends: list[tuple[int, int]] = []
        for last in range(first, count):
            begin = used
            joined = (kind[latest] == KEEPS) & (last > first)
            if self.relaxed and last == first > 0:
                joined |= True  # the input of a kept first layer may leave as well
            before = rows[:, latest], joined, latest.start
            known = 1 if few else begin
            places = rows[:, :known], place[:known], kind[:known]
            for group in self._groups(last, before, places, few=few):
                alike = used
                for kinds, labels, most in apart(group, self.holding):
                    made, order = self.thin(labels, most)
                    new = slice(used, used + made.shape[1])
                    rows[:, new], kind[new], place[new] = made, kinds[order], last + 1
                    used = new.stop
                if self.nested:  # what a run may hold is known before it is a piece itself
                    self.nested.add(first, last, alike, rows[:, alike:used], kind[alike:used])
            latest = slice(begin, begin + 1 if few else used)
            ends.append((begin, used))
        levels = np.zeros((0, used), dtype=np.int64)
        if self.offload:
            levels = self._levels(rows[PARENT, :used], kind[:used], first, ends)
        return Labels(rows[:, :used], kind[:used], ends, levels)

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
