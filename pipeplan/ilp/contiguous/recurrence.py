"""What the dynamic program of contiguous plans asks at each step: one stage, or one cut, in front.

Both hold for one period. `Recurrence.best_stages` puts a stage in front of what is behind it,
`Recurrence.send` the two transfers of a cut; `dynamic_program` says which values these are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import gcd
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pipeplan.ilp.contiguous.stage_choice import (
    INFINITE,
    NO_HOST,
    NOTHING_AWAY,
    Away,
    HostWay,
    Options,
    best_stages,
)
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.offload.byte_options_table import segment_byte_options
from pipeplan.ilp.offload.copy_placement import transfer_ns
from pipeplan.ilp.segment_tables import (
    Array,
    SegmentTables,
    cuttable,
    forwards,
    loads,
    pinned_elsewhere,
    running_max,
    segment_tables,
)
from pipeplan.ilp.symmetry import gpu_classes

SECOND: Final = 10**9
"""In ns."""


@dataclass(frozen=True, slots=True)
class PeriodQuery:
    """The period in question: an integer, or a real number just below it.

    `longest` is the largest load asked for where that is less than fits into the period.
    """

    period: int
    just_below: bool = False
    longest: int | None = None

    @property
    def limit(self) -> int:
        """The largest integer load allowed."""
        fits = self.period - self.just_below
        return fits if self.longest is None else min(fits, self.longest)


@dataclass
class Recurrence:
    """The stages and cuts of a chain on classes of GPUs, as tables that are read once.

    Attributes:
        costs: The chain on the cluster.
        most: No stage may keep more micro-batches (R6); None for no limit.
        messages: Whether memory counts every tensor of a stage's boundaries once. Without it the
            exact model's answer is optimistic, hence a bound; the paper model's is the same.
        any_k: Whether to relax to what every contiguous plan of any k needs: nothing waits, so V
            is a plain sum, and at V / T micro-batches on average some instant has ceil(V / T).
        offload: Whether stages may offload what they keep, and wait for it (`stage_choice`).
        small: Whether their layers may be stages of their own then: an estimate, with messages
            a careful one.
    """

    costs: CostModel
    most: int | None = None
    messages: bool = False
    any_k: bool = False
    offload: bool = False
    small: bool = False
    tables: SegmentTables = field(init=False)
    classes: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        """Read the tables once."""
        self.tables = segment_tables(self.costs)
        self.classes = gpu_classes(self.costs)
        self._loads = [loads(self.costs, gpus[0]) for gpus in self.classes]
        self._cuttable = cuttable(self.costs)
        self._budgets = [self.costs.budgets[gpus[0]] for gpus in self.classes]
        self._closed = [self._closed_on(kind) for kind in self._ids()]
        self._sends: dict[tuple[int, int], tuple[Array, Array]] = {}
        self._options = self._stage_options()
        if self.offload:
            self._way, self._levels = self._host_way(), self._byte_levels()
            self._away = [self._away_on(kind) for kind in self._ids()]

    @property
    def serial_ns(self) -> int:
        """A period at which one micro-batch at a time is processed: no shorter one needs less."""
        boundaries = range(self.costs.layers - 1)
        pairs = [self._cut_ns(here, there) for here in self._ids() for there in self._ids()]
        slowest = sum(max(int(f[j] + b[j]) for f, b in pairs) for j in boundaries)
        overhead = 2 * self.costs.cluster.action_overhead_ns * self.costs.layers
        moved = 0
        if self.small:
            most = max(int(away[-1].max()) for away in self._away)
            moved = 2 * transfer_ns(self.costs, most)
        return int(max(table[0, -1] for table in self._loads) + slowest + overhead + moved + 1)

    def best_stages(
        self, asked: PeriodQuery, kind: int, start: Array
    ) -> tuple[Array, Array, Array]:
        """By first layer of a stage on class `kind`: the smallest V, its last layer and option."""
        gpu = self.classes[kind][0]
        machine = (
            self._loads[kind],
            self._closed[kind],
            float(self.costs.cluster.gpus[gpu].speed),
            self._budgets[kind],
        )
        most = -1 if self.most is None else self.most
        question = asked.period, asked.just_below, asked.limit, self.any_k, most
        way, away = (self._way, self._away[kind]) if self.offload else (NO_HOST, NOTHING_AWAY)
        found = spans, ends, chosen = tuple(np.empty(len(start), dtype=np.int64) for _ in range(3))
        best_stages(question, machine, self._options, way, away, start, *found)
        return spans, ends, chosen

    def send(self, asked: PeriodQuery, kind: int, other: int, reach: Array) -> Array:
        """V of the cut behind each layer, the stage behind it on class `other`."""
        behind = np.concatenate([reach[1:], [INFINITE]])
        forward, backward = self._cut_ns(kind, other)
        good = (behind < INFINITE) & self._cuttable
        if self.costs.cluster.links.duplex == "half":
            good &= forward + backward <= asked.limit
        else:
            good &= np.maximum(forward, backward) <= asked.limit
        value = np.where(good, behind, 0)
        if self.costs.cluster.links.duplex == "half" and not self.any_k:
            value = extend_span(value, forward + backward, asked.period)
        else:
            value = value + forward + backward
        return np.where(good, value, INFINITE)

    def _closed_on(self, kind: int) -> NDArray[np.bool_]:
        """[i, j] -> whether no GPU of a class may have layers i..j, whatever the period is."""
        updating = self.tables.states + self.tables.optimizer > self._budgets[kind]
        return updating | pinned_elsewhere(self.costs, self.classes[kind][0])

    def _stage_options(self) -> Options:
        """What stages may choose from: nothing here."""
        tables = self.tables
        need = tables.states + self._working()
        if self.messages or not self.costs.exact:
            need = need + tables.messages
        counts = np.ones_like(need)
        saved = np.ascontiguousarray(tables.saved)
        return counts, np.zeros_like(need)[..., None], saved[..., None], need[..., None]

    def _working(self) -> Array:
        """[i, j] -> bytes beside the states while layers i..j run or are updated."""
        tables = self.tables
        running = np.maximum(tables.forward, tables.late)
        working: Array = np.maximum(running, tables.saved + tables.backward)
        if self.costs.semantics == "2bw":
            working = np.maximum(working, tables.optimizer)
        return working

    def _byte_levels(self) -> Array:
        """[i, j, n, m] -> what can leave of what a micro-batch keeps, fewest bytes first."""
        levels: Array = np.stack([*segment_byte_options(self.costs)], axis=-1)
        return levels[:, :, None]

    def _host_way(self) -> HostWay:
        """To the host and back."""
        host = self.costs.cluster.host
        assert host is not None
        common = gcd(SECOND, host.bandwidth_bytes_per_s)
        over, under = SECOND // common, host.bandwidth_bytes_per_s // common
        return over, under, host.duplex == "half", self.small

    def _away_on(self, kind: int) -> Away:
        """What may leave a class of GPUs; nothing is free for messages where they are counted."""
        tables, budget = self.tables, self._budgets[kind]
        free = budget - tables.states - (tables.messages if self.messages else 0)
        apart = whole = np.zeros_like(free)
        if self.small:
            apart = budget - tables.states - running_max(np.diag(self._working()), 0)
            if self.messages:
                whole = running_max(np.diag(tables.saved), 0)
        return forwards(self.costs, self.classes[kind][0]), free, apart, whole, self._levels

    def _cut_ns(self, kind: int, other: int) -> tuple[Array, Array]:
        """Transfer ns behind each layer, forward from class `kind` to `other` and back.

        None behind the last one, nor where there is one GPU: they may exceed what machine code
        counts, and never happen.
        """
        if (kind, other) not in self._sends:
            here, there = self.classes[kind][0], self.classes[other][-1]
            costs, cuts = self.costs, range(self.costs.layers - 1)
            if costs.gpus == 1:
                cuts = range(0)
            forward, backward = np.zeros((2, self.costs.layers), dtype=np.int64)
            for j in cuts:
                forward[j] = costs.send_forward_ns(j, here, there)
                backward[j] = costs.send_backward_ns(j, there, here)
            self._sends[kind, other] = (forward, backward)
        return self._sends[kind, other]

    def _ids(self) -> range:
        return range(len(self.classes))


def extend_span(span: Array, load: Array, period: int) -> Array:
    """The smallest V' >= V + U with V' mod T in [U, T]: one exclusive pair in front of V."""
    edge = -(-span // period) * period
    return np.where(span + load <= edge, span + load, edge + load)


def extend_one_span(span: int, load: int, period: int) -> int:
    """`extend_span` of one number."""
    edge = -(-span // period) * period
    return span + load if span + load <= edge else edge + load
