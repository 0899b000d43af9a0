"""The sections of a run's page: the plan's, with what was measured beside it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pipeplan.action_times import ActionTimes
from pipeplan.plan import Plan
from pipeplan.report.grid import short
from pipeplan.report.page.idle import spent
from pipeplan.report.page.lateness import Pair, delays, durations
from pipeplan.report.page.measured import MeasuredActivities, planned_excerpt
from pipeplan.report.page.of_plan import (
    LABELS,
    computes,
    key_figures,
    lanes_of,
    memory_over_time,
    search_progress,
    stages,
)
from pipeplan.report.page.replayed_step import ReplayedStep
from pipeplan.report.page.run_files import RunFiles
from pipeplan.report.page.run_sections import Delays, Durations, TrainingSteps, Validations
from pipeplan.report.page.schedule import MOST_BARS, Activity, Excerpt, PlannedActivities
from pipeplan.report.page.sections import (
    Figure,
    Idle,
    IdleTime,
    KeyFigures,
    Lane,
    Page,
    Section,
    Timeline,
)
from pipeplan.units import format_ns

_UNTIMED = (
    "No times of single actions: the run was too short, was on GPUs, or is of an older version."
)


def run_page(files: RunFiles) -> Page:
    """All that the folder of a run tells."""
    plan, told = files.plan, list(run_figures(files))
    sections: list[Section] = [KeyFigures(tuple(told))] if told else []
    if plan is not None and files.times is not None:
        sections += TracedStep.of(plan, files.times).sections()
    if files.memory is not None:
        period = plan.period_ns if plan is not None else 0
        sections.append(memory_over_time(files.memory, period))
    if files.steps:
        sections.append(TrainingSteps(files.steps))
    if files.validations:
        sections.append(Validations(files.validations))
    if plan is not None:
        sections.append(stages(plan))
        if plan.solver.history:
            sections.append(search_progress(plan))
    name = "a run" if plan is None else short(plan.chain.name, 60)
    facts = () if plan is None or files.times is not None else (_UNTIMED,)
    return Page(f"Run of {name}", files.folder, tuple(sections), facts)


def run_figures(files: RunFiles) -> Iterator[Figure]:
    """The plan's figures and what the run measured of them."""
    run, plan = files.run, files.plan
    if run is None:
        return
    measured = run.measured
    crowd = f"{run.host.ranks} ranks on {run.host.cores} cores" if run.host.ranks else ""
    yield Figure("period", "ns", run.predicted.period_ns, measured.period_ns, "best four in a row")
    yield Figure("step", "ns", run.predicted.step_ns, measured.step_ns, f"best; {crowd}")
    if plan is not None and files.times is not None:
        yield from _replayed(plan, files.times)
    if plan is not None:
        samples = plan.microbatches * plan.chain.microbatch_size * 1e9
        rate = None if not measured.step_ns else samples / measured.step_ns
        planned = samples / max(1, plan.step_ns)
        yield Figure("samples per second", "rate", planned, rate, "of one pipeline")
        shown = {"period", "step", "samples per second"}
        for each in key_figures(plan).figures:
            if each.name not in shown and each.unit != "bytes":
                yield each
    for rank, (told, found) in enumerate(
        zip(run.predicted.peak_bytes, _peaks(files), strict=True)
    ):
        yield Figure(f"peak of rank {rank}", "bytes", told, found)
    for name, loss in (("first loss", measured.first_loss), ("last loss", measured.last_loss)):
        if loss is not None:
            yield Figure(name, "number", None, loss)


def _replayed(plan: Plan, times: ActionTimes) -> Iterator[Figure]:
    found = ReplayedStep.of(plan, times)
    if found is not None:
        rest = "the rest is messages and what happens between operations"
        yield Figure(found.name, "ns", found.replayed_ns, found.measured_ns, rest)


def _peaks(files: RunFiles) -> tuple[int | None, ...]:
    """Of the whole run where it was instrumented, else of the step whose bytes were counted."""
    assert files.run is not None
    whole = files.run.measured.peak_bytes
    if any(size is not None for size in whole) or files.memory is None:
        return whole
    found = files.memory.measured or (None,) * len(whole)
    return tuple(each.peak.size if each is not None else None for each in found)


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One step, as planned and as it was."""

    times: ActionTimes
    planned: PlannedActivities
    measured: MeasuredActivities
    windows: tuple[Excerpt, Excerpt]
    """Of the plan's time and of the run's; they begin together."""

    @classmethod
    def of(cls, plan: Plan, times: ActionTimes) -> TracedStep:
        """The step of `times` beside that of `plan`.

        Raises:
            InputError: if the actions are none of the plan.
        """
        planned, measured = PlannedActivities(plan), MeasuredActivities.of(plan, times)
        windows = planned_excerpt(planned, times), measured.excerpt(times)
        return cls(times, planned, measured, windows)

    def sections(self) -> Iterator[Section]:
        """Everything about it."""
        plan = self.planned.plan
        yield self.timeline()
        pairs = [list(self._pairs(gpu)) for gpu in range(len(plan.cluster.gpus))]
        yield Durations(tuple(each for mine in pairs for each in durations(plan, mine)))
        yield Delays(
            tuple(
                each for mine in pairs for each in delays(plan, mine, self.measured, self.windows)
            )
        )
        yield IdleTime(tuple(self.idle()))

    def timeline(self) -> Timeline:
        """The lanes of plan and run under each other; of a very long step its begin."""
        plan, told = self.planned.plan, self._note()
        planned, measured = (list(part) for part in self._activities())
        length = max(window.length_ns for window in self.windows)
        most = max(len(planned), len(measured))
        if most > MOST_BARS:
            length = length * MOST_BARS // most
            told += f" Its first {format_ns(length)} are shown."
        lanes = zip(
            lanes_of(plan, _begun(planned, self.windows[0], length), self.windows[0], "planned"),
            lanes_of(plan, _begun(measured, self.windows[1], length), self.windows[1], "measured"),
            strict=True,
        )
        both: list[Lane] = [each for pair in lanes for each in pair if each.bars]
        title = f"Step {self.times.step}, plan over run"
        return Timeline(title, length, tuple(both), told)

    def _note(self) -> str:
        lengths = self.times.lengths_ns
        span = f"{format_ns(min(lengths))} to {format_ns(max(lengths))}"
        return (
            f"{LABELS} The step has the median length of {len(lengths)} steps, which took {span}."
            " Transfers are measured where somebody waited for them."
        )

    def _activities(self) -> Iterator[Iterator[Activity]]:
        planned, measured = self.windows
        yield self.planned.within(planned)
        yield self.measured.within(measured)

    def _pairs(self, gpu: int) -> Iterator[Pair]:
        """The computes of a GPU within the step, each beside the plan's; updates that it plans."""
        window, real = self.windows
        updates = {
            each.stage: each
            for each in self.planned.within(window)
            if each.kind == "OPT" and each.place == gpu
        }
        for each in self.measured.computes:
            if each.place != gpu or not real.begin_ns <= each.start_ns < real.end_ns:
                continue
            told = (
                updates.get(each.stage)
                if each.kind == "OPT"
                else self.planned(each.kind, each.stage, each.microbatch)
            )
            if told is not None:
                yield told, each

    def idle(self) -> Iterator[Idle]:
        """The time of each GPU, planned and measured."""
        plan, (window, real) = self.planned.plan, self.windows
        wide = window if window.whole_step else window.wider(plan.period_ns)
        told = [each for each in self.planned.within(wide) if computes(each)]
        for gpu, device in enumerate(plan.cluster.gpus):
            name = short(device.name)
            mine = (each for each in told if each.place == gpu)
            parts = spent(plan, mine, self.planned, window)
            yield Idle(name, "planned", window.length_ns, parts)
            done = (each for each in self.measured.computes if each.place == gpu)
            parts = spent(plan, done, self.measured, real)
            yield Idle(name, "measured", real.length_ns, parts)


def _begun(activities: list[Activity], window: Excerpt, length: int) -> Iterator[Activity]:
    return (each for each in activities if each.start_ns - window.begin_ns < length)
