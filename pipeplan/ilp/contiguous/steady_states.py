"""Steady states of the self-timed (eager) execution of one contiguous partition.

Each stage has a limit ("cap") on its micro-batches in flight. With the largest limits that its own
bytes allow a pipeline is fastest, but stages run ahead of later ones, and what they send waits
there and needs room as well. So first the least limit for the first stage is sought that is as
fast, then lower ones and lower limits where memory overflows, then every other variant. Self-timed
execution becomes periodic: Sriram and Bhattacharyya (2000). The search is ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.incumbent import Incumbent
from pipeplan.ilp.memory import in_flight, memory_rows
from pipeplan.ilp.schedule import Schedule, chain_ops, duration, resource
from pipeplan.plan import OpKind, Stage
from pipeplan.self_timed import Cycle, Order, Step, eager_cycle, eager_pace, staircase

ORDERS: tuple[Order, ...] = ("alternate", "backward")
PACE = 6
"""Micro-batches per stage that a first look takes."""

Stages = tuple[Stage, ...]
Caps = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Known:
    """All caps from `least` to `caps` give the same execution.

    `period` is None where options do not allow its cycle; `offered` tells whether it was a plan
    rather than a question.
    """

    order: Order
    least: Caps
    caps: Caps
    period: Fraction | None
    offered: bool


@dataclass
class SteadyStates:
    """Eager executions of one partition, each different one once; cycles are offered as plans."""

    state: Incumbent
    stages: Stages
    caps: Caps
    _known: list[_Known] = field(default_factory=list)

    @cached_property
    def lower_bound(self) -> Fraction:
        """No cycle is shorter."""
        return lower_bound(self.state.costs, self.stages, self.caps)

    def throughput(self) -> Fraction:
        """About what the first of `expansions` will give."""
        steps = steps_of(self.state.costs, self.stages)
        found = eager_pace(steps, self.caps, ORDERS[0], PACE * len(self.stages))
        return 2 * self.lower_bound if found is None else found

    def expansions(self) -> Iterator[None]:
        """Offers cycles, the most promising first; yields after a few executions each."""
        for order in ORDERS:
            yield from self._least(order)
        for caps in dict.fromkeys(variants(self.caps)):
            seen = len(self._known)
            for order in ORDERS:
                if not self._knows(caps, order, offered=True):
                    self._offer(caps, order)
            if len(self._known) > seen:
                yield

    def fastest(self) -> Fraction | None:
        """The shortest period per micro-batch so far, whether its bytes do or not."""
        return min((known.period for known in self._known if known.period), default=None)

    def _least(self, order: Order) -> Iterator[None]:
        """The fastest cycle with the fewest bytes that wait; lower caps until bytes do."""
        caps: Caps = self.caps
        before: Caps = ()
        while min(caps) > 0 and caps != before:
            fastest = self._period(caps, order)
            if fastest is None or not self._promises(fastest):
                return
            schedule = self._offer(self._slowed(caps, order, fastest), order)
            yield
            if schedule is None or not self._promises(schedule.per_microbatch):
                return
            before, caps = caps, self._fewer(schedule, caps)

    def _slowed(self, caps: Caps, order: Order, fastest: Fraction) -> Caps:
        """The least limit for the input at which a micro-batch takes no longer."""
        low, high = 0, caps[0]
        while high - low > 1:
            middle = (low + high) // 2
            period = self._period(_limited(caps, middle), order)
            if period is not None and period <= fastest:
                high = middle
            else:
                low = middle
        return _limited(caps, high)

    def _fewer(self, schedule: Schedule, caps: Caps) -> Caps:
        """One micro-batch less than there were in each stage whose GPU's bytes do not do."""
        rows = memory_rows(self.state.costs, schedule)
        full = {row.gpu for row in rows if row.peak_bytes > row.budget_bytes}
        held = in_flight(self.state.costs, schedule)
        return tuple(
            min(cap, most - 1) if stage.gpu in full else cap
            for stage, cap, most in zip(self.stages, caps, held, strict=True)
        )

    def _promises(self, period: Fraction) -> bool:
        """Whether a plan of this period would be the best one."""
        return self.state.best is None or period < self.state.best.per_microbatch

    def _knows(self, caps: Caps, order: Order, *, offered: bool) -> _Known | None:
        """What was seen of these caps, or of others that give the same."""
        for known in self._known:
            if known.order == order and known.offered >= offered and _within(known, caps):
                return known
        return None

    def _period(self, caps: Caps, order: Order) -> Fraction | None:
        """Per micro-batch; None if there is no cycle that may be offered."""
        known = self._knows(caps, order, offered=False)
        return self._run(caps, order, offered=False)[1] if known is None else known.period

    def _offer(self, caps: Caps, order: Order) -> Schedule | None:
        """Offers the cycle, if it could be the best plan."""
        known = self._knows(caps, order, offered=False)
        if known is not None and (known.period is None or not self._promises(known.period)):
            return None
        if not self._promises(lower_bound(self.state.costs, self.stages, caps)):
            return None
        cycle, period = self._run(caps, order, offered=True)
        if cycle is None or period is None:
            return None
        times = dict(zip(chain_ops(self.stages), cycle.times, strict=True))
        schedule = Schedule(self.stages, cycle.period, cycle.k, times)
        if self._promises(period):
            self.state.offer(schedule)
        return schedule

    def _run(
        self, caps: Caps, order: Order, *, offered: bool
    ) -> tuple[Cycle | None, Fraction | None]:
        """The cycle and its period, which is None where options do not allow the cycle."""
        steps = steps_of(self.state.costs, self.stages)
        cycle = eager_cycle(steps, caps, order)
        ks, period = self.state.options.ks, None
        if cycle is not None and (len(ks) > 1 or ks[0] % cycle.k == 0):
            period = Fraction(cycle.period, cycle.k)
        least = caps if cycle is None else cycle.most
        self._known.append(_Known(order, least, caps, period, offered))
        return cycle, period


def steps_of(costs: CostModel, stages: Stages) -> list[Step]:
    """The ops of one micro-batch in chain order."""
    return [
        Step(*op, resource(costs, stages, op), duration(costs, stages, op))
        for op in chain_ops(stages)
    ]


def lower_bound(costs: CostModel, stages: Stages, caps: Caps) -> Fraction:
    """The largest of the loads and of V(s) / cap(s): no eager cycle is shorter."""
    loads: dict[tuple[int, ...], int] = {}
    spans = [0] * len(stages)
    begun: list[int] = []
    now = 0
    for op in chain_ops(stages):
        length = duration(costs, stages, op)
        place = resource(costs, stages, op)
        loads[place] = loads.get(place, 0) + length
        if op[0] is OpKind.F:
            begun.append(now)
        now += length
        if op[0] is OpKind.B:
            spans[op[1]] = now - begun[op[1]]
    held = (Fraction(span, cap) for span, cap in zip(spans, caps, strict=True))
    return max(Fraction(max(loads.values())), *held)


def variants(caps: Caps) -> Iterator[Caps]:
    """The caps; one less in each stage; a limit for the input; one less in each stage alone.

    With a limit for the input and nothing else, or one less in each stage, what fits in memory at
    all is among these: no stage then holds more than its cap.
    """
    yield caps
    yield tuple(max(1, cap - 1) for cap in caps)
    for most in range(caps[0], 0, -1):
        yield _limited(caps, most)
        yield tuple(map(min, caps, staircase(len(caps), most)))
    for index, cap in enumerate(caps):
        if cap > 1:
            yield (*caps[:index], cap - 1, *caps[index + 1 :])


def _limited(caps: Caps, most: int) -> Caps:
    return tuple(min(cap, most) for cap in caps)


def _within(known: _Known, caps: Caps) -> bool:
    bounds = zip(known.least, caps, known.caps, strict=True)
    return all(least <= cap <= most for least, cap, most in bounds)
