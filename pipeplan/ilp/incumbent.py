"""The best schedule so far, what is proven, and when to stop: shared by all search phases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from math import ceil
from random import Random
from typing import Literal

from pipeplan.ilp.clock import SearchClock
from pipeplan.ilp.compiled import AVAILABLE, NO_COMPILER
from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.memory import fits, in_flight_until_update, memory_rows
from pipeplan.ilp.objective import cost
from pipeplan.ilp.offload.host_states import with_states_placed
from pipeplan.ilp.offload.repair import repair_by_offloading
from pipeplan.ilp.schedule import Schedule, unrolled, whole_step
from pipeplan.units import MAX_INT

Report = Callable[[float, Fraction | None, Fraction, float | None, str], None]
"""(elapsed s, best period per micro-batch in ns, bound, gap, phase)."""

FINEST = 1024
"""Parts of a nanosecond that a bound is rounded down to where its own fraction is too long."""

MODEL_K = 3
"""Largest k that models try where smaller ones are allowed."""

NO_PLAN = Fraction(2**62), Fraction(0)
"""The cost of no plan."""

BoundName = Literal["any", "k1", "contiguous"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What the search may do."""

    microbatches: int
    limit_versions: bool
    """Whether `microbatches` was asked for under 2bw, so that (R6) restricts the schedules."""
    ks: tuple[int, ...]
    contiguous_only: bool
    time_limit_s: float
    gap: float
    seed: int
    workers: int
    deterministic: bool
    offload: bool = False
    """Whether what a stage keeps may reside on the host; then bytes prove nothing."""
    whole_step: bool = False
    """Whether plans are step plans (T6); other schedules are written as such."""
    without: frozenset[str] = frozenset()
    """Strategies and provers that are left out, for ablations."""
    clock: SearchClock = field(default_factory=SearchClock, compare=False)


@dataclass
class Incumbent:
    """The best schedule that fits, the bounds, and the clock."""

    costs: CostModel
    options: SearchOptions
    report: Report | None = None
    best: Schedule | None = None
    contiguous: Fraction | None = None
    """Period per micro-batch of the best contiguous schedule."""
    bounds: dict[BoundName, Fraction] = field(default_factory=dict)
    phase: str = "start"
    infeasible: str | None = None
    """Why no plan exists, if that is proven."""
    notes: list[str] = field(default_factory=list)

    def note_missing_compiler(self) -> None:
        """Say once that schedules are searched without machine code, if they are."""
        if not AVAILABLE and NO_COMPILER not in self.notes:
            self.notes.append(NO_COMPILER)

    @property
    def most_in_flight(self) -> int | None:
        """Largest number of micro-batches a stage may keep (R6); None for no limit."""
        return self.options.microbatches + 1 if self.options.limit_versions else None

    @property
    def model_ks(self) -> tuple[int, ...]:
        """Micro-batches per period that CP-SAT's models try: they grow with k.

        Longer cycles come from eager execution and annealing.
        """
        ks = self.options.ks
        return tuple(k for k in ks if k <= MODEL_K) or ks

    @property
    def elapsed(self) -> float:
        """Seconds of the limit that are used; work done instead where that is what counts."""
        return self.options.clock.elapsed()

    @property
    def remaining(self) -> float:
        """Seconds left."""
        return max(0.0, self.options.time_limit_s - self.elapsed)

    @property
    def gap_bound(self) -> BoundName:
        """The bound that is valid for all plans the options allow; the largest such one."""
        valid: list[BoundName] = ["any"]
        if self.options.ks == (1,):
            valid.append("k1")
        if self.options.contiguous_only:
            valid.append("contiguous")
        return max(valid, key=lambda name: self.bounds.get(name, Fraction(0)))

    @property
    def bound(self) -> Fraction:
        """The bound that the gap uses, in ns per micro-batch."""
        return self.bounds.get(self.gap_bound, Fraction(0))

    def lowest_period(self, k: int = 1) -> int:
        """The shortest period of k micro-batches in whole ns that is not refuted."""
        return max(1, ceil(self.bounds["any"] * k))

    @property
    def gap(self) -> float | None:
        """(period per micro-batch - bound) / bound; None without a plan or a bound."""
        if self.best is None or not self.bound:
            return None
        return float((self.best.per_microbatch - self.bound) / self.bound)

    @property
    def cost(self) -> tuple[Fraction, Fraction]:
        """What the semantics minimize, of the best plan; infinite without one."""
        return NO_PLAN if self.best is None else self._cost(self.best)

    @property
    def done(self) -> bool:
        """Whether the gap asked for is reached or the time is over."""
        return self.remaining <= 0 or self.closed

    @property
    def closed(self) -> bool:
        """Whether the gap asked for is reached."""
        return self.gap is not None and self.gap <= self.options.gap

    def random(self, strategy: str) -> Random:
        """A strategy's own random numbers, repeatable for a seed."""
        return Random(f"{self.options.seed} {strategy}")

    def uses(self, strategy: str) -> bool:
        """Whether a strategy or prover is not left out."""
        return strategy not in self.options.without

    def give(self, strategy: str, run: Callable[[float], object], seconds: float) -> None:
        """Let a strategy or prover have `seconds` of the limit, unless it is left out."""
        if self.uses(strategy):
            run(seconds)

    def set_phase(self, phase: str) -> None:
        """Name the strategy or prover that runs next: `name`, or `name: what it tries`."""
        self.phase = phase
        self.notify()

    def notify(self) -> None:
        """Report the state to whoever listens."""
        if self.report:
            period = self.best.per_microbatch if self.best else None
            self.report(self.options.clock.wall_s, period, self.bound, self.gap, self.phase)

    def raise_bound(self, name: BoundName, value: Fraction, *, from_bytes: bool = True) -> None:
        """Raise a bound; one for all plans holds for every kind, rounded up where k is 1.

        Fractions that a plan file could not hold are rounded down, by less than a picosecond. What
        follows `from_bytes` that stay on the GPUs says nothing where they may leave.
        """
        if from_bytes and self.options.offload:
            return
        if max(value.numerator, value.denominator) > MAX_INT:
            value = Fraction(int(value * FINEST), FINEST)
        raised: dict[BoundName, Fraction] = {name: value}
        if name == "any":
            raised |= {"contiguous": value, "k1": Fraction(ceil(value))}
        for each, least in raised.items():
            self.bounds[each] = max(self.bounds.get(each, Fraction(0)), least)
        self.notify()

    def is_feasible(self, schedule: Schedule) -> bool:
        """Whether a schedule keeps tied layers together, pins, every memory and (R6)."""
        if not self.costs.keeps_pins(schedule.stages):
            return False
        if not self.costs.keeps_ties(schedule.stages):
            return False
        most = self.most_in_flight
        if most is not None and max(in_flight_until_update(self.costs, schedule)) > most:
            return False
        rows = memory_rows(self.counted, self._placed(schedule))
        host = self.costs.cluster.host
        waits = sum(row.host_bytes for row in rows)
        return fits(rows) and (not waits or (host is not None and waits <= host.memory_bytes))

    def offer(self, schedule: Schedule) -> bool:
        """Take a schedule if it fits; keep it if it is the best. Returns whether it fits.

        Where one k was asked for, a schedule of fewer micro-batches is written with k of them.
        """
        if self.options.whole_step:
            schedule = whole_step(self.costs, schedule, self.options.microbatches)
        elif len(self.options.ks) == 1 and self.options.ks[0] % schedule.k == 0:
            schedule = unrolled(schedule, self.options.ks[0])
        schedule = self._placed(schedule)
        if not self.is_feasible(schedule):
            mended = self._repaired(schedule)
            if mended is None:
                return False
            schedule = mended
        gpus = [stage.gpu for stage in schedule.stages]
        if len(gpus) == len(set(gpus)):
            period = schedule.per_microbatch
            self.contiguous = period if self.contiguous is None else min(self.contiguous, period)
        if self.best is None or self._cost(schedule) < self._cost(self.best):
            self.best = schedule
            self.notify()
        return True

    @cached_property
    def counted(self) -> CostModel:
        """What schedules are judged by: states are on the host only where a stage says so."""
        return replace(self.costs, states_away=False) if self.costs.states_away else self.costs

    def _placed(self, schedule: Schedule) -> Schedule:
        """The schedule with its states on the host where they must and may be."""
        if self.costs.states_away:
            return with_states_placed(self.counted, schedule)
        if not any(stage.states == "host" for stage in schedule.stages):
            return schedule
        here = (stage.model_copy(update={"states": "gpu"}) for stage in schedule.stages)
        return replace(schedule, stages=tuple(here))

    def _repaired(self, schedule: Schedule) -> Schedule | None:
        """The schedule with what must be offloaded to fit, if allowed and better than the best."""
        best = self.best
        if not self.options.offload or schedule.offloads:
            return None
        if best is not None and self._cost(schedule) >= self._cost(best):
            return None
        made = repair_by_offloading(self.counted, schedule)
        return made if made is not None and self.is_feasible(made) else None

    def _cost(self, schedule: Schedule) -> tuple[Fraction, Fraction]:
        return cost(self.costs, schedule, self.options.microbatches)
