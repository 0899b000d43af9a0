"""The compared plans on this machine, in turns: what was predicted beside what was measured.

Every plan that fits runs as `pipeplan.launch` runs it, one process per GPU. On the `sleep` clock
ops and transfers take their planned time, scaled, so that published profiles of GPUs run where
there are none; on the `real` clock the chain's task trains. A round runs each plan once, so that
what slows the machine for a while slows all of them; a figure is the median of its rounds.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from importlib.util import find_spec
from itertools import combinations
from math import ceil
from typing import Literal

from pipeplan.chain import Chain
from pipeplan.cluster import Cluster
from pipeplan.compare.action_probe import NAME, per_action_ns, probe_plan
from pipeplan.compare.local_launches import LocalLaunches
from pipeplan.compare.points import ComparisonPoint
from pipeplan.compare.predicted import STEPS, predicted_ns
from pipeplan.compare.rows import Row
from pipeplan.errors import InputError, PipeplanError
from pipeplan.jobs import Tell
from pipeplan.plan import Plan, Semantics
from pipeplan.report.page import ReplayedStep
from pipeplan.report.run import RunMeasurements

LaunchClock = Literal["real", "sleep"]
"""Whether launched ranks train, or sleep for planned times."""
OP_NS = 10**7
"""What ops of each plan sleep on average, or more: 0.1 to 0.2 ms pass beside one."""
RUN_NS = 10**9
"""Predicted length of a run, or more."""
COUNTED_STEPS = 3
_COUNTING = -1
"""In place of a round's number: a run that counts bytes."""
_TRACED_STEPS = 4
"""Of a run under 2bw, or one has no step that is told action by action."""
_WINDOWS = 8
"""Periods that a run has behind its fill, or more: the measured one is their median."""


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """How plans are launched.

    Attributes:
        clock: `sleep` passes planned times; `real` trains the chain's task.
        rounds: how often each plan runs.
        time_scale: what planned times are multiplied by to sleep; None: so much that the ops of
            each plan sleep `OP_NS` on average, or more. On the real clock 1.
    """

    clock: LaunchClock
    rounds: int = 3
    time_scale: Fraction | None = None

    def check(self, chain: Chain, clusters: Sequence[Cluster]) -> None:
        """Refuse what cannot run here, before anything is compared.

        Raises:
            InputError: if there is no torch, times of a training are to be scaled, the chain has
                no task to train, or there are fewer cores than ranks that compute.
        """
        if find_spec("torch") is None:
            raise InputError("launch: got no torch here, need it: pip install 'pipeplan[run]'")
        if self.clock == "sleep":
            return
        if self.time_scale is not None:
            raise InputError("launch: got a time scale for a training, need one that sleeps")
        if chain.task is None:
            raise InputError(
                f"launch: chain {chain.name!r} names no task to train, need a chain of `pipeplan"
                " profile`; on the clock `sleep` any runs"
            )
        ranks, cores = max(len(cluster.gpus) for cluster in clusters), _cores()
        if ranks > cores:
            raise InputError(
                f"launch: got {ranks} ranks that train on {cores} cores, need a core for each:"
                " times would say nothing. Compare fewer GPUs, or use the clock `sleep`."
            )


@dataclass(slots=True)
class LaunchedPlan:
    """One plan and its runs; times are ns per micro-batch, those of a step under flush."""

    names: tuple[str, ...]
    """Of the rows that have this plan."""
    plan: Plan
    predicted_ns: float
    """By the simulator on the eager clock: the period; under flush the step, updates included.

    On the `sleep` clock with what an op takes here beside its sleep."""
    measured: list[float] = field(default_factory=list)
    """One figure per round, on the plan's time scale."""
    rests: list[float] = field(default_factory=list)
    """By how much a step of each round was longer than its replay with the times that its ops
    took (`ReplayedStep`), as a share; none on the `sleep` clock."""
    peak_bytes: tuple[int | None, ...] | None = None
    """Per GPU, of live tensors; None where no module ran."""
    failure: str | None = None

    @property
    def measured_ns(self) -> float | None:
        """The median round; None where no run ended well."""
        if self.failure is not None or not self.measured:
            return None
        return statistics.median(self.measured)

    @property
    def rest(self) -> float | None:
        """The median of `rests`."""
        return statistics.median(self.rests) if self.rests else None

    @property
    def spread(self) -> float:
        """By how much rounds differ, as a share of the median."""
        middle = self.measured_ns
        return 0.0 if middle is None else (max(self.measured) - min(self.measured)) / middle


@dataclass(frozen=True, slots=True)
class LaunchedPoint:
    """All plans of one comparison point, in the order of its rows."""

    point: ComparisonPoint
    request: LaunchRequest
    time_scale: Fraction
    plans: tuple[LaunchedPlan, ...]
    interrupted: bool = False
    """Whether Ctrl-C left runs out."""
    action_ns: float = 0.0
    """What an op of a sleeping rank takes here beside its sleep; predictions count it."""

    @property
    def done(self) -> list[LaunchedPlan]:
        """Those that were measured."""
        return [each for each in self.plans if each.measured_ns is not None]

    def order(self) -> OrderedPairs:
        """How far plans are in the predicted order."""
        agree = parted = close = 0
        for one, other in combinations(self.done, 2):
            predicted = one.predicted_ns - other.predicted_ns
            noise = max(one.spread, other.spread) * max(one.predicted_ns, other.predicted_ns)
            if abs(predicted) <= noise:
                close += 1
            elif predicted * ((one.measured_ns or 0) - (other.measured_ns or 0)) > 0:
                agree += 1
            else:
                parted += 1
        return OrderedPairs(agree, parted, close)


@dataclass(frozen=True, slots=True)
class OrderedPairs:
    """Pairs of plans: measured as predicted, the other way round, and nearer than rounds vary."""

    agree: int
    parted: int
    close: int


def launch_point(
    point: ComparisonPoint,
    semantics: Semantics,
    request: LaunchRequest,
    tell: Tell = lambda share, what: None,
) -> LaunchedPoint:
    """Runs every plan of `semantics` that fits, in turns; Ctrl-C keeps the runs that ended.

    A plan whose run fails keeps the reason, and does not run again.

    Args:
        point: its rows have the plans.
        semantics: of the rows that run.
        request: how.
        tell: hears of each run.
    """
    plans = contenders(point, semantics)
    scale = _scale([each.plan for each in plans], request)
    turns = [(number, each) for number in range(request.rounds) for each in plans]
    if request.clock == "real":
        turns = [(_COUNTING, each) for each in plans] + turns
    interrupted, action_ns = False, 0.0
    try:
        with LocalLaunches() as launches:
            if request.clock == "sleep" and plans:
                tell(0.0, NAME)
                action_ns = _probe(launches, plans, scale)
            for done, (number, each) in enumerate(turns):
                what = "bytes" if number == _COUNTING else f"round {number + 1}"
                tell(done / len(turns), f"{what}: {each.names[0]}")
                if each.failure is None:
                    _run(launches, each, request, scale, counts=number == _COUNTING)
    except KeyboardInterrupt:
        interrupted = True
    return LaunchedPoint(point, request, scale, plans, interrupted, action_ns)


def contenders(point: ComparisonPoint, semantics: Semantics) -> tuple[LaunchedPlan, ...]:
    """The different plans of the rows that fit, each with the names of its rows."""
    rows = [
        row
        for row in point.rows
        if isinstance(row, Row) and row.fits and row.semantics == semantics
    ]
    names: dict[tuple[object, ...], list[str]] = {}
    plans: dict[tuple[object, ...], Plan] = {}
    for row in rows:
        key = row.plan.stages, row.plan.ops
        names.setdefault(key, []).append(row.name)
        plans.setdefault(key, row.plan)
    return tuple(
        LaunchedPlan(tuple(names[key]), plan, predicted_ns(plan)) for key, plan in plans.items()
    )


def _probe(launches: LocalLaunches, plans: Sequence[LaunchedPlan], scale: Fraction) -> float:
    """What an op takes here beside its sleep, by a launch of its own; predictions grow by it."""
    op_ns = round(scale * min(_mean_op_ns(each.plan) for each in plans))
    plan = probe_plan(len(plans[0].plan.cluster.gpus), op_ns)
    probe = LaunchedPlan((NAME,), plan, predicted_ns(plan))
    _run(launches, probe, LaunchRequest("sleep"), Fraction(1), counts=False)
    if probe.measured_ns is None:
        return 0.0
    action_ns = per_action_ns(plan, probe.measured_ns)
    for each in plans:
        each.predicted_ns = predicted_ns(each.plan, action_ns / float(scale))
    return action_ns


def _scale(plans: Sequence[Plan], request: LaunchRequest) -> Fraction:
    if request.clock == "real":
        return Fraction(1)
    if request.time_scale is not None or not plans:
        return request.time_scale or Fraction(1)
    exact = OP_NS / min(_mean_op_ns(plan) for plan in plans)
    return Fraction(f"{float(exact):.3g}")


def _cores() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _mean_op_ns(plan: Plan) -> Fraction:
    lasting = [op.duration_ns for op in plan.ops if op.kind.is_compute]
    return max(Fraction(sum(lasting), len(lasting)), Fraction(1))


def _run(
    launches: LocalLaunches,
    each: LaunchedPlan,
    request: LaunchRequest,
    scale: Fraction,
    *,
    counts: bool,
) -> None:
    """One run of one plan; `counts`: it counts bytes and is not timed."""
    steps = COUNTED_STEPS if counts else _steps(each, request.clock, scale)
    words = ["--clock", request.clock, "--steps", str(steps)]
    if request.clock == "sleep":
        words += ["--time-scale", str(scale)]
    else:
        words += ["--instrument" if counts else "--no-sample"]
    try:
        found = launches.run(each.plan, words, fresh=request.clock == "real" and not counts)
    except (PipeplanError, OSError) as error:
        each.failure = str(error)
        return
    if counts:
        each.peak_bytes = found.measured.peak_bytes
        return
    each.measured.append(_per_microbatch(each.plan, found.measured, scale))
    step = ReplayedStep.of(each.plan, found.times) if found.times else None
    if step is not None:
        each.rests.append(step.rest)


def _steps(each: LaunchedPlan, clock: LaunchClock, scale: Fraction) -> int:
    """Steps of a run: about `RUN_NS`, and enough to measure a period and to tell of ops."""
    plan = each.plan
    needed = (1 + STEPS) * plan.microbatches
    if plan.semantics == "2bw":
        needed = 2 * len(plan.stages) + _WINDOWS * plan.k
        if clock == "real":
            needed = max(needed, _TRACED_STEPS * plan.microbatches)
    wanted = RUN_NS / (each.predicted_ns * float(scale))
    return ceil(max(needed, wanted) / plan.microbatches)


def _per_microbatch(plan: Plan, found: RunMeasurements, scale: Fraction) -> float:
    """Measured ns per micro-batch, on the plan's time scale."""
    whole, count = (
        (found.step_ns, plan.microbatches)
        if plan.semantics == "flush"
        else (found.median_period_ns, plan.k)
    )
    assert whole is not None, "a run has as many steps as it needs"
    return float(whole / count / scale)
