"""When bytes are offloaded and prefetched, on each GPU's host link: (H3), (H4).

Each copy is offloaded as early as the host link is free after the forward (a whole input alone:
after its begin), and prefetched as late as possible before the backward. Copies that rest longest
are placed first. Source: ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from pipeplan.ilp.compiled import Ints
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.memory_events import ExactMemoryEvents
from pipeplan.ilp.offload.byte_options import Sent, leaves_early
from pipeplan.ilp.reservation_table import (
    NOWHERE,
    add,
    clear,
    earliest_fit,
    latest_fit,
    remove,
)
from pipeplan.ilp.schedule import Schedule, StageOffload, duration
from pipeplan.plan import OpKind
from pipeplan.units import ceil_div

Choice = tuple[int, Sent]
"""A stage, and what it sends."""


def transfer_ns(costs: CostModel, size: int) -> int:
    """(H2) of `size` bytes."""
    host = costs.cluster.host
    assert host is not None
    return ceil_div(size * 10**9, host.bandwidth_bytes_per_s)


@dataclass(frozen=True)
class CopyPlacement:
    """The way between one GPU and the host under a schedule of computes."""

    costs: CostModel
    schedule: Schedule
    sweep: ExactMemoryEvents

    def placed(self, chosen: Sequence[Choice], *, back_first: bool) -> tuple[StageOffload, ...]:
        """Times of all copies of the chosen stages, but those that do not rest long enough.

        Args:
            chosen: stages of one GPU.
            back_first: which of the two transfers has the choice where they share a way.
        """
        host = self.costs.cluster.host
        assert host is not None
        out = self._empty_table(2 * len(chosen))
        back = out if host.duplex == "half" else self._empty_table(len(chosen))
        made = {
            stage: StageOffload(stage, runs, size, transfer_ns(self.costs, size), {}, enters)
            for stage, (size, runs, enters) in chosen
        }
        for stage, copy, left, due in self._by_rest(chosen):
            offload = made[stage]
            pair = self._pair(offload, left, due, (out, back), back_first)
            if pair is None:
                continue
            tried = replace(offload, times={**offload.times, copy: pair})
            if self._orderly(tried):
                made[stage] = tried
                add(out, pair[0], offload.ns)
                add(back, pair[1], offload.ns)
        return tuple(made[stage] for stage in sorted(made) if made[stage].times)

    def _empty_table(self, stages: int) -> Ints:
        """Of a way that each copy of so many stages takes once, and one more while it is tried."""
        table = np.zeros((2, 2 + stages * self.schedule.k), np.int64)
        clear(table, self.schedule.period)
        return table

    def _by_rest(self, chosen: Sequence[Choice]) -> list[tuple[int, int, int, int]]:
        """(stage, copy, when it may leave, start of B), longest rest first."""
        found: list[tuple[int, int, int, int]] = []
        for stage, sent in chosen:
            forward, first = (OpKind.F, stage), self.schedule.stages[stage].first
            length = duration(self.costs, self.schedule.stages, forward)
            if leaves_early(self.costs.chain, first, sent):
                length = 0
            begins, dues = self.schedule.times[forward], self.schedule.times[OpKind.B, stage]
            pairs = enumerate(zip(begins, dues, strict=True))
            found += [(stage, copy, begin + length, due) for copy, (begin, due) in pairs]
        return sorted(found, key=lambda row: (row[2] - row[3], row))

    def _pair(
        self,
        offload: StageOffload,
        left: int,
        due: int,
        tables: tuple[Ints, Ints],
        back_first: bool,
    ) -> tuple[int, int] | None:
        """Start of OFFLOAD and of PREFETCH; None where there is no room for both."""
        out, back = tables
        shared, length = out is back, offload.ns
        if shared and back_first:
            returns = latest_fit(back, due, length)
            if returns == NOWHERE:
                return None
            add(back, returns, length)
            leaves = earliest_fit(out, left, length)
            remove(back, returns, length)
        else:
            leaves = earliest_fit(out, left, length)
            if leaves == NOWHERE:
                return None
            if shared:
                add(out, leaves, length)
            returns = latest_fit(back, due, length)
            if shared:
                remove(out, leaves, length)
        if NOWHERE in (leaves, returns):
            return None
        rests = leaves + length <= self.sweep.deferred(offload.stage, returns)
        return (int(leaves), int(returns)) if rests else None

    def _orderly(self, offload: StageOffload) -> bool:
        """(R5) among the copies that have them."""
        period, k = self.schedule.period, self.schedule.k
        copies = sorted(offload.times)
        first = copies[0]
        later = tuple(time + period for time in offload.times[first])
        rows = [*(offload.times[copy] for copy in copies), later]
        assert first < k
        return all(
            one + offload.ns <= other
            for before, after in pairwise(rows)
            for one, other in zip(before, after, strict=True)
        )
