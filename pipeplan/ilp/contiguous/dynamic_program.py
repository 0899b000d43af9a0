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
from functools import cached_property
from itertools import groupby
from math import gcd
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pipeplan.ilp.clock import OutOfTimeError, never
from pipeplan.ilp.contiguous.gpu_orders import gpu_orders
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
from pipeplan.ilp.incumbent import SearchOptions
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
from pipeplan.plan import Stage

SECOND: Final = 10**9
"""In ns."""
MAX_STATES: Final = 12_000
"""Of the DP over sets of GPUs; beyond it GPUs keep the cluster's order."""
SLOW_S: Final = 0.05
"""Where a question takes longer, one order of GPUs is asked for first, and time limits end it."""
STEP_S: Final = 1.5e-5
"""What putting a stage in front of a state takes, .."""
SEGMENT_S: Final = 3e-9
""".. each segment of layers, .."""
OPTION_S: Final = 3e-10
""".. and each of its options, few of which are looked at."""


@dataclass(frozen=True, slots=True)
class ContiguousPartition:
    """Stages in chain order; `spans[s]` = V of stage s in ns."""

    period: int
    stages: tuple[Stage, ...]
    spans: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Frontier:
    """For every first layer: the smallest V, the last layer of its stage, the state behind."""

    min_span: Array
    stage_end: Array
    before: Array
    """Its number; -1: nothing is behind."""

    def merge(self, other: Frontier) -> Frontier:
        """The better of two for every first layer."""
        mine = self.min_span <= other.min_span
        return Frontier(
            np.where(mine, self.min_span, other.min_span),
            np.where(mine, self.stage_end, other.stage_end),
            np.where(mine, self.before, other.before),
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
        offload: Whether stages may offload what they keep, and wait for it (`stage_choice`).
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
        self._orders = gpu_orders(self.classes, MAX_STATES * (not self.in_order))
        self.complete = self._orders.complete
        self._loads = [loads(self.costs, gpus[0]) for gpus in self.classes]
        self._cuttable = cuttable(self.costs)
        self._budgets = [self.costs.budgets[gpus[0]] for gpus in self.classes]
        self._closed = [self._closed_on(kind) for kind in self._ids()]
        self._sends: dict[tuple[int, int], tuple[Array, Array]] = {}
        self._options = self._stage_options()
        if self.offload:
            self._way, self._levels = self._host_way(), self._byte_levels()
            self._away = [self._away_on(kind) for kind in self._ids()]

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

    @property
    def is_slow(self) -> bool:
        """Whether a question may take long: where GPUs of many kinds have many orders."""
        return self.question_s > SLOW_S

    def limit(self, search: SearchOptions, share: float = 1.0) -> Callable[[], bool]:
        """Tells when a slow program has had a share of the time left; others need no look."""
        if not self.is_slow:
            return never
        left = search.time_limit_s - search.clock.spent
        return search.clock.limit(share * left, self.question_s / len(self._orders.states))

    @cached_property
    def question_s(self) -> float:
        """Seconds that one question may take."""
        options, segments = self._options[1].size, self.costs.layers**2
        step_s = STEP_S + SEGMENT_S * segments + OPTION_S * options
        return step_s * self._orders.transitions

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

    def _ids(self) -> range:
        return range(len(self.classes))

    def solve(
        self,
        period: int,
        just_below: bool = False,
        longest: int | None = None,
        over: Callable[[], bool] = never,
    ) -> ContiguousPartition | None:
        """The partition of smallest V in front at `period`; None if none fits.

        Args:
            period: In ns; counts of micro-batches follow from it.
            just_below: Whether to ask for a real period just below the integer instead (any_k):
                loads must then stay under it, and V = n * period needs n + 1 micro-batches.
            longest: The largest load of a GPU or link where that is less than fits.
            over: Whether to give up.

        Raises:
            OutOfTimeError: if it was over before the answer was found.
        """
        fronts = self._fronts(PeriodQuery(period, just_below, longest), over)
        best = min(fronts, key=lambda state: fronts[state].min_span[0], default=None)
        if best is None or fronts[best].min_span[0] >= INFINITE:
            return None
        return self._trace(period, fronts, best)

    def each(self, period: int, longest: int) -> Iterator[ContiguousPartition]:
        """As `solve`, for every number of GPUs in turn that a partition fits on."""
        fronts = self._fronts(PeriodQuery(period, longest=longest), never)
        ends = [state for state in fronts if fronts[state].min_span[0] < INFINITE]
        for _, states in groupby(ends, key=lambda state: sum(self._orders.states[state][0])):
            best = min(states, key=lambda state: fronts[state].min_span[0])
            yield self._trace(period, fronts, best)

    def _fronts(self, asked: PeriodQuery, over: Callable[[], bool]) -> dict[int, Frontier]:
        """By number of state: the smallest V of all that comes behind each layer."""
        fronts: dict[int, Frontier] = {}
        for number, states in enumerate(self._orders.behind):
            if over():
                raise OutOfTimeError
            behind = {n: fronts[n] for n in states if n in fronts}
            front = self._extend(asked, number, behind)
            if front is not None:
                fronts[number] = front
        return fronts

    def shortest(
        self, lowest: int, over: Callable[[], bool] = never
    ) -> ContiguousPartition | None:
        """The partition of the smallest feasible integer period >= `lowest`; None if none fits."""
        return self.bisect(lowest, over)[1]

    def bisect(
        self, lowest: int, over: Callable[[], bool] = never
    ) -> tuple[int, ContiguousPartition | None]:
        """As `shortest`, until it is `over`; with it the period up to which none fits.

        With many kinds of GPUs each question may take a second.

        Raises:
            OutOfTimeError: if it was over before any answer was found.
        """
        low, high = lowest, max(lowest, self.serial_ns)
        found = self.solve(low, over=over)
        if found is not None:
            return lowest - 1, found
        found = self.solve(high, over=over)
        if found is None:
            return high, None
        while high - low > 1:
            middle = (low + high) // 2
            try:
                candidate = self.solve(middle, over=over)
            except OutOfTimeError:
                break
            if candidate is None:
                low = middle
            else:
                high, found = middle, candidate
        return low, found

    def _extend(
        self, asked: PeriodQuery, number: int, behind: dict[int, Frontier]
    ) -> Frontier | None:
        """One more stage, on a GPU of the state's class, in front of each way to go on behind."""
        used, kind = self._orders.states[number]
        if sum(used) == 1:
            start = np.full(self.costs.layers, INFINITE)
            start[-1] = 0
            return self._stage(asked, kind, start, -1)
        merged: Frontier | None = None
        for before, front in behind.items():
            start = self._send(asked, kind, self._orders.states[before][1], front.min_span)
            step = self._stage(asked, kind, start, before)
            merged = step if merged is None else merged.merge(step)
        return merged

    def _stage(self, asked: PeriodQuery, kind: int, start: Array, before: int) -> Frontier:
        """The smallest V of a stage on class `kind` that begins with each layer, and its end."""
        spans, ends, _ = self._best_stages(asked, kind, start)
        return Frontier(spans, ends, np.full_like(ends, before))

    def _best_stages(
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

    def _trace(self, period: int, fronts: dict[int, Frontier], number: int) -> ContiguousPartition:
        """Follow the choices from the first layer on; GPUs of a class in the cluster's order."""
        stages: list[Stage] = []
        spans: list[int] = []
        free = [list(gpus) for gpus in self.classes]
        first = 0
        while True:
            front = fronts[number]
            last = int(front.stage_end[first])
            gpu = free[self._orders.states[number][1]].pop(0)
            stages.append(Stage(id=len(stages), layers=(first, last), gpu=gpu))
            spans.append(int(front.min_span[first]))
            first, number = last + 1, int(front.before[first])
            if number < 0:
                return ContiguousPartition(period, tuple(stages), tuple(spans))


def extend_span(span: Array, load: Array, period: int) -> Array:
    """The smallest V' >= V + U with V' mod T in [U, T]: one exclusive pair in front of V."""
    edge = -(-span // period) * period
    return np.where(span + load <= edge, span + load, edge + load)


def extend_one_span(span: int, load: int, period: int) -> int:
    """`extend_span` of one number."""
    edge = -(-span // period) * period
    return span + load if span + load <= edge else edge + load
