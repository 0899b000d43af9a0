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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final

import numpy as np

from pipeplan.chain import Chain
from pipeplan.ilp.offload import byte_options_table
from pipeplan.ilp.recompute.label_maker import LabelMaker
from pipeplan.ilp.recompute.labels import (
    BEGIN,
    INNER,
    KEEPS,
    KEPT,
    MORE,
    PARENT,
    PEAK,
    RUNS,
    SAVED,
    STAYS,
    Labels,
)
from pipeplan.ilp.runs import Run, Runs
from pipeplan.ilp.segment_tables import Array
from pipeplan.plan import Stage

UNUSED: Final = 2**60
"""`more` of an option that is none."""


@dataclass(frozen=True)
class StageOptions:
    """Options of all segments; `[i, j, n]`, unused ones have `more` = `UNUSED`."""

    more: Array
    saved: Array
    peak: Array
    levels: Array
    """[i, j, n, m] -> bytes of `saved` that can leave, fewest first; empty without offloading."""
    ids: Array
    """Which label of its first layer each option is."""
    labels: list[Labels] = field(repr=False)
    """Of the segments that begin at each layer."""

    @cached_property
    def counts(self) -> Array:
        """[i, j] -> how many options there are."""
        used: Array = (self.more < UNUSED).sum(axis=2)
        return used

    @cached_property
    def cheapest_first(self) -> StageOptions:
        """The same in the order of `more`, and no more columns than are used."""
        order = np.argsort(self.more, axis=2, kind="stable")[:, :, : self.counts.max()]
        more, saved, peak, ids = (
            np.take_along_axis(table, order, axis=2)
            for table in (self.more, self.saved, self.peak, self.ids)
        )
        levels = np.take_along_axis(self.levels, order[..., None], axis=2)
        return StageOptions(more, saved, peak, levels, ids, self.labels)

    def only(self, stages: Sequence[Stage]) -> StageOptions:
        """The options of these stages' segments alone."""
        more = np.full_like(self.more, UNUSED)
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
    count, maker = len(chain.layers), LabelMaker(chain, relaxed, offload, nested)
    none = np.zeros((count, count, maker.most), dtype=np.int64)
    more, saved, peak, ids = none + UNUSED, none.copy(), none.copy(), none
    levels = np.zeros((*none.shape, byte_options_table.MOST if offload else 0), dtype=np.int64)
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
            levels[start, last, :used] = labels.levels[:, slice(*numbers)].T
            ids[start, last, :used] = np.arange(*numbers)
    return StageOptions(more, saved, peak, levels, ids, found)
