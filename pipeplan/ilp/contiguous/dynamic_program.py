"""The best contiguous 1F1B plan: one stage per GPU, exact by dynamic programming and bisection.

Let V be the time from the start of a stage's forward to the end of its backward, for one
micro-batch. GPU exclusivity modulo T asks that V mod T lies in [f + b, T] (0 counts as T), so the
smallest V follows from the stages behind alone: with `push(V, U) = V + U` if that does not pass a
multiple of T, else `ceil(V / T) * T + U`,

    D[S + g][i] = min over j of push(send(D[S][j + 1], j), U_g(i..j)),

where `send` pushes both transfers of a cut (half duplex) or adds them (full duplex). The stage
then keeps ceil(V / T) micro-batches. Memory and V only fall with smaller V behind, so the smallest
V is a sufficient state, and the feasible periods are an upper set. (Rederived; compare Beaumont,
Eyraud-Dubois, Shilova, "MadPipe".)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, product
from math import prod

import numpy as np
from numpy.typing import NDArray

from pipeplan.cluster import Host
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.offload.byte_options_table import segment_byte_options
from pipeplan.ilp.offload.min_span import (
    INFINITE,
    OffloadBytes,
    StageTiming,
    min_span,
    transfer_ns,
)
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
from pipeplan.plan import Stage

MAX_STATES = 4096
"""Of the DP over sets of GPUs; beyond it GPUs keep the cluster's order."""
MANY_STATES = 200
"""From here on it is asked for one order first."""


@dataclass(frozen=True, slots=True)
class ContiguousPartition:
    """Stages in chain order; `spans[s]` = V of stage s in ns."""

    period: int
    stages: tuple[Stage, ...]
    spans: tuple[int, ...]


State = tuple[tuple[int, ...], int]
"""(how many GPUs of each class are used, class of the stage that comes first)."""


@dataclass(frozen=True, slots=True)
class Frontier:
    """For every first layer: the smallest V, the last layer of its stage, the state behind."""

    min_span: Array
    stage_end: NDArray[np.intp]
    before: list[State | None]

    def merge(self, other: Frontier) -> Frontier:
        """The better of two for every first layer."""
        mine = self.min_span <= other.min_span
        return Frontier(
            np.where(mine, self.min_span, other.min_span),
            np.where(mine, self.stage_end, other.stage_end),
            [
                one if keep else two
                for keep, one, two in zip(mine, self.before, other.before, strict=True)
            ],
        )


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

    def copies(self, spans: Array) -> Array:
        """Micro-batches in flight at least, for each V."""
        return spans // self.period + 1 if self.just_below else -(-spans // self.period)


@dataclass
class ContiguousDP:
    """Answers, for any period, whether a contiguous 1F1B plan fits.

    Attributes:
        costs: The chain on the cluster.
        most: No stage may keep more micro-batches (R6); None for no limit.
        messages: Whether memory counts every tensor of a stage's boundaries once. Without it the
            exact model's answer is optimistic, hence a bound; the paper model's is the same.
        any_k: Whether to relax to what every contiguous plan of any k needs: nothing waits, so V
            is a plain sum, and at V / T micro-batches on average some instant has ceil(V / T).
        offload: Whether stages may offload what they keep, and wait for it (`offload.min_span`).
        small: Whether their layers may be stages of their own then: an estimate, with messages
            a careful one.
        in_order: Whether GPUs keep the cluster's order, which is quick where many kinds differ.
    """

    costs: CostModel
    most: int | None = None
    messages: bool = False
    any_k: bool = False
    offload: bool = False
    small: bool = False
    in_order: bool = False
    tables: SegmentTables = field(init=False)
    classes: list[list[int]] = field(init=False)
    complete: bool = field(init=False)
    """Whether every order of GPUs is covered, so that an answer None is a proof."""

    def __post_init__(self) -> None:
        """Read the tables once."""
        self.tables = segment_tables(self.costs)
        self.classes = gpu_classes(self.costs)
        self._states, self.complete = _all_states(self.classes, MAX_STATES * (not self.in_order))
        self._loads = [loads(self.costs, gpus[0]) for gpus in self.classes]
        self._cuttable = cuttable(self.costs)
        self._elsewhere = [pinned_elsewhere(self.costs, gpus[0]) for gpus in self.classes]
        self._sends: dict[tuple[int, int], tuple[Array, Array]] = {}
        tables = self.tables
        running = np.maximum(tables.forward, tables.late)
        working = np.maximum(running, tables.saved + tables.backward)
        if self.costs.semantics == "2bw":
            working = np.maximum(working, tables.optimizer)
        self._fixed = tables.states + working
        self._alone = tables.states + running_max(np.diag(working), 0)
        self._whole = running_max(np.diag(tables.saved), 0)
        self._update = tables.states + tables.optimizer
        if self.messages or not self.costs.exact:
            self._fixed = self._fixed + tables.messages
        if self.offload:
            self._forwards = [forwards(self.costs, gpus[0]) for gpus in self.classes]
            self._levels = segment_byte_options(self.costs)

    @property
    def is_slow(self) -> bool:
        """Whether one question may take longer than a tenth of a second."""
        return len(self._states) > MANY_STATES

    @property
    def serial_ns(self) -> int:
        """A period at which one micro-batch at a time is processed: no shorter one needs less."""
        boundaries = range(self.costs.layers - 1)
        pairs = [self._cut_ns(here, there) for here in self._ids() for there in self._ids()]
        slowest = sum(max(int(f[j] + b[j]) for f, b in pairs) for j in boundaries)
        overhead = 2 * self.costs.cluster.action_overhead_ns * self.costs.layers
        moved = 2 * int(transfer_ns(self._host, self._levels).max()) if self.small else 0
        return int(max(table[0, -1] for table in self._loads) + slowest + overhead + moved + 1)

    def _ids(self) -> range:
        return range(len(self.classes))

    def solve(
        self, period: int, just_below: bool = False, longest: int | None = None
    ) -> ContiguousPartition | None:
        """The partition of smallest V in front at `period`; None if none fits.

        Args:
            period: In ns; counts of micro-batches follow from it.
            just_below: Whether to ask for a real period just below the integer instead (any_k):
                loads must then stay under it, and V = n * period needs n + 1 micro-batches.
            longest: The largest load of a GPU or link where that is less than fits.
        """
        fronts = self._fronts(PeriodQuery(period, just_below, longest))
        best = min(fronts, key=lambda state: fronts[state].min_span[0], default=None)
        if best is None or fronts[best].min_span[0] >= INFINITE:
            return None
        return self._trace(period, fronts, best)

    def each(self, period: int, longest: int) -> Iterator[ContiguousPartition]:
        """As `solve`, for every number of GPUs in turn that a partition fits on."""
        fronts = self._fronts(PeriodQuery(period, longest=longest))
        ends = [state for state in fronts if fronts[state].min_span[0] < INFINITE]
        for _, states in groupby(ends, key=lambda state: sum(state[0])):
            best = min(states, key=lambda state: fronts[state].min_span[0])
            yield self._trace(period, fronts, best)

    def _fronts(self, asked: PeriodQuery) -> dict[State, Frontier]:
        """By what is used: the smallest V of all that comes behind each layer."""
        fronts: dict[State, Frontier] = {}
        for state in self._states:
            options = [before for before in self._predecessors(state) if before in fronts]
            front = self._extend(asked, state, {before: fronts[before] for before in options})
            if front is not None:
                fronts[state] = front
        return fronts

    def shortest(self, lowest: int) -> ContiguousPartition | None:
        """The partition of the smallest feasible integer period >= `lowest`; None if none fits."""
        return self.bisect(lowest)[1]

    def bisect(
        self, lowest: int, over: Callable[[], bool] = lambda: False
    ) -> tuple[int, ContiguousPartition | None]:
        """As `shortest`, until it is `over`; with it the period up to which none fits.

        With many kinds of GPUs each question may take a second.
        """
        low, high = lowest, max(lowest, self.serial_ns)
        found = self.solve(low)
        if found is not None:
            return lowest - 1, found
        found = self.solve(high)
        if found is None:
            return high, None
        while high - low > 1 and not over():
            middle = (low + high) // 2
            candidate = self.solve(middle)
            if candidate is None:
                low = middle
            else:
                high, found = middle, candidate
        return low, found

    def _predecessors(self, state: State) -> Iterator[State]:
        used, kind = state
        fewer = tuple(count - (other == kind) for other, count in enumerate(used))
        return ((fewer, other) for other in self._ids() if fewer[other])

    def _extend(
        self, asked: PeriodQuery, state: State, behind: dict[State, Frontier]
    ) -> Frontier | None:
        """One more stage, on a GPU of the state's class, in front of each way to go on behind."""
        count, (used, kind) = self.costs.layers, state
        load = self._loads[kind]
        allowed = np.triu(load <= asked.limit) & ~self._elsewhere[kind]
        if sum(used) == 1:
            start = np.full(count, INFINITE)
            start[-1] = 0
            return self._stage(asked, kind, start, allowed, None)
        merged: Frontier | None = None
        for before, front in behind.items():
            start = self._send(asked, kind, before[1], front.min_span)
            step = self._stage(asked, kind, start, allowed, before)
            merged = step if merged is None else merged.merge(step)
        return merged

    def _stage(
        self,
        asked: PeriodQuery,
        kind: int,
        start: Array,
        allowed: NDArray[np.bool_],
        before: State | None,
    ) -> Frontier:
        """V of a stage i..j on class `kind` for all i, j at once, and the best j for each i."""
        load = self._loads[kind]
        spans = (
            start[None, :] + load
            if self.any_k
            else extend_span(start[None, :], load, asked.period)
        )
        copies = asked.copies(spans)
        good = allowed & (start < INFINITE)[None, :]
        if self.most is not None:
            good &= copies <= self.most
        budget = self.costs.budgets[self.classes[kind][0]]
        room = budget - self._fixed
        good &= self._update <= budget
        others = np.minimum(copies - 1, room // np.maximum(self.tables.saved, 1) + 1)
        if self.offload:
            spans = np.where(good, spans, INFINITE)
            small = self._small(kind)
            size = OffloadBytes(self._free(kind), room, self.tables.saved, self._levels, *small)
            stay = StageTiming(asked.period, spans, self._forwards[kind], load)
            spans = min_span(self._host, stay, size, good)
        else:
            good &= others * self.tables.saved <= room
            spans = np.where(good, spans, INFINITE)
        choice = np.argmin(spans, axis=1)
        reach = spans[np.arange(len(choice)), choice]
        return Frontier(reach, choice, [before] * len(choice))

    def _free(self, kind: int) -> Array:
        """Memory of a class beside the states, and beside messages where they are counted."""
        budget = self.costs.budgets[self.classes[kind][0]]
        beside = self.tables.messages if self.messages else 0
        free: Array = budget - self.tables.states - beside
        return free

    def _small(self, kind: int) -> tuple[Array | None, Array | None]:
        """What `OffloadBytes` tells of small stages on a class of GPUs: `apart`, `whole`."""
        if not self.small:
            return None, None
        apart = self.costs.budgets[self.classes[kind][0]] - self._alone
        return apart, self._whole if self.messages else None

    @property
    def _host(self) -> Host:
        assert self.costs.cluster.host is not None
        return self.costs.cluster.host

    def _send(self, asked: PeriodQuery, kind: int, other: int, reach: Array) -> Array:
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

    def _cut_ns(self, kind: int, other: int) -> tuple[Array, Array]:
        """Transfer ns of every boundary, forward from class `kind` to `other` and back."""
        if (kind, other) not in self._sends:
            here, there = self.classes[kind][0], self.classes[other][-1]
            costs, cuts = self.costs, range(self.costs.layers)
            forward = [costs.send_forward_ns(j, here, there) for j in cuts]
            backward = [costs.send_backward_ns(j, there, here) for j in cuts]
            self._sends[kind, other] = (np.array(forward), np.array(backward))
        return self._sends[kind, other]

    def _trace(
        self, period: int, fronts: dict[State, Frontier], state: State
    ) -> ContiguousPartition:
        """Follow the choices from the first layer on; GPUs of a class in the cluster's order."""
        stages: list[Stage] = []
        spans: list[int] = []
        free = [list(gpus) for gpus in self.classes]
        first, at = 0, state
        while True:
            front = fronts[at]
            last = int(front.stage_end[first])
            gpu = free[at[1]].pop(0)
            stages.append(Stage(id=len(stages), layers=(first, last), gpu=gpu))
            spans.append(int(front.min_span[first]))
            before = front.before[first]
            if before is None:
                return ContiguousPartition(period, tuple(stages), tuple(spans))
            first, at = last + 1, before


def extend_span(span: Array, load: Array, period: int) -> Array:
    """The smallest V' >= V + U with V' mod T in [U, T]: one exclusive pair in front of V."""
    edge = -(-span // period) * period
    return np.where(span + load <= edge, span + load, edge + load)


def extend_one_span(span: int, load: int, period: int) -> int:
    """`extend_span` of one number."""
    edge = -(-span // period) * period
    return span + load if span + load <= edge else edge + load


def _all_states(classes: list[list[int]], most: int) -> tuple[list[State], bool]:
    """Up to `most` states in order of GPUs used; whether they cover every order of GPUs."""
    sizes = [len(members) for members in classes]
    if len(classes) == 1 or len(classes) * prod(size + 1 for size in sizes) <= most:
        counts = sorted(
            product(*(range(size + 1) for size in sizes)), key=lambda used: (sum(used), used)
        )
        return [(used, kind) for used in counts for kind, count in enumerate(used) if count], True
    order = [kind for kind, members in enumerate(classes) for _ in members]
    states: list[State] = []
    used = [0] * len(classes)
    for kind in reversed(order):
        used[kind] += 1
        states.append((tuple(used), kind))
    return states, False
