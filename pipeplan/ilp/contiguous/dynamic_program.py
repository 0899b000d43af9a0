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
from typing import Final

import numpy as np

from pipeplan.ilp.clock import OutOfTimeError, never
from pipeplan.ilp.contiguous.gpu_orders import gpu_orders
from pipeplan.ilp.contiguous.recurrence import PeriodQuery, Recurrence
from pipeplan.ilp.contiguous.stage_choice import INFINITE
from pipeplan.ilp.incumbent import SearchOptions
from pipeplan.ilp.segment_tables import Array
from pipeplan.plan import Stage

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


@dataclass
class ContiguousDP(Recurrence):
    """Answers, for any period, whether a contiguous 1F1B plan fits.

    Attributes:
        in_order: Whether GPUs keep the cluster's order, which is quick where many kinds differ.
        complete: Whether every order of GPUs is covered, so that an answer None is a proof.
    """

    in_order: bool = False
    complete: bool = field(init=False)

    def __post_init__(self) -> None:
        """List the orders of GPUs."""
        super().__post_init__()
        self._orders = gpu_orders(self.classes, MAX_STATES * (not self.in_order))
        self.complete = self._orders.complete

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
            start = self.send(asked, kind, self._orders.states[before][1], front.min_span)
            step = self._stage(asked, kind, start, before)
            merged = step if merged is None else merged.merge(step)
        return merged

    def _stage(self, asked: PeriodQuery, kind: int, start: Array, before: int) -> Frontier:
        """The smallest V of a stage on class `kind` that begins with each layer, and its end."""
        spans, ends, _ = self.best_stages(asked, kind, start)
        return Frontier(spans, ends, np.full_like(ends, before))

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
