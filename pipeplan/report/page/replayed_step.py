"""A step of a run beside a replay whose operations take as long as they took in it.

The replay keeps the plan's order and messages, so what is left between the two is what else a run
spends: on messages, between operations, and because an operation was once longer than its mean.
So it says whether a run differs from its plan because operations take longer than in the profile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Literal

from pipeplan.action_times import ActionTimes
from pipeplan.errors import InputError
from pipeplan.lowering import lower
from pipeplan.plan import OpKind, Plan
from pipeplan.report.page.measured import MeasuredActivities
from pipeplan.report.page.run_files import read_timed
from pipeplan.report.run import TrainingRun
from pipeplan.report.tables import PredictedMeasured
from pipeplan.simulator import OpTimes, simulate


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """A step as replayed on the eager clock with the times of its operations, and as it was.

    Under flush it lasts from its first operation to the end of its updates, under 2bw from its
    first forward of the last stage to that of the next step.
    """

    step: int
    """As metrics.jsonl counts steps."""
    replayed_ns: int
    measured_ns: int

    @classmethod
    def of(cls, plan: Plan, times: ActionTimes) -> ReplayedStep | None:
        """The step that `times` tells of; None where a replay is too long or never steady.

        Raises:
            InputError: if the actions are none of the plan.
        """
        measured = MeasuredActivities.of(plan, times)
        replayed = _step_ns(plan, _means(measured, times))
        if replayed is None:
            return None
        return cls(times.step, replayed, measured.excerpt(times).length_ns)

    @property
    def name(self) -> str:
        """What it is in tables."""
        return f"step {self.step}, replayed with its operations' times"

    @property
    def rest(self) -> float:
        """By how much it was longer, as a share."""
        return self.measured_ns / self.replayed_ns - 1


def replayed_rows(run: TrainingRun, folder: str) -> Iterator[PredictedMeasured]:
    """The step of the run in `folder`, if it tells of one; counting bytes slows operations down.

    Raises:
        InputError: if a file of the folder is none that a run of its plan wrote.
    """
    plan, times = read_timed(Path(folder))
    if plan is None or times is None or run.instrumented:
        return
    found = ReplayedStep.of(plan, times)
    if found is not None:
        name = f"{run.semantics}: {found.name}"
        yield PredictedMeasured(name, "ns", found.replayed_ns, found.measured_ns)


def _means(measured: MeasuredActivities, times: ActionTimes) -> OpTimes:
    """How long each operation of each stage took on average, in the step."""
    step = measured.excerpt(times)
    lengths: dict[tuple[OpKind | Literal["OPT"], int], list[int]] = {}
    for each in measured.computes:
        if step.begin_ns <= each.start_ns < step.end_ns:
            lengths.setdefault((each.kind, each.stage), []).append(each.length_ns)
    return {op: round(mean(each)) for op, each in lengths.items()}


def _step_ns(plan: Plan, op_times: OpTimes) -> int | None:
    try:
        found = simulate(plan, lower(plan), clock="eager", updates=True, op_times=op_times)
    except InputError:  # of more micro-batches than a replay keeps
        return None
    return found.step_ns or None
