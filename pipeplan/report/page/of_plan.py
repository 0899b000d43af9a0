"""The sections of a plan's page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pipeplan.memory_terms import GpuTerms, MemoryReport
from pipeplan.plan import OpKind, Plan, Rational, Solver, Stage
from pipeplan.report import tables
from pipeplan.report.grid import LETTER, grid_rows, short
from pipeplan.report.memory import compared, measured_of
from pipeplan.report.memory_tables import purpose_name
from pipeplan.report.page.idle import spent
from pipeplan.report.page.schedule import Activity, Excerpt, PlannedActivities
from pipeplan.report.page.sections import (
    Bar,
    Figure,
    Idle,
    IdleTime,
    KeyFigures,
    Lane,
    MemoryOverTime,
    MemorySeries,
    Page,
    SearchProgress,
    SearchStep,
    Section,
    Source,
    StageRow,
    Stages,
    TermRow,
    Timeline,
)
from pipeplan.report.remat import remat_shares, spans

LABELS = (
    "0F3 is the forward of stage 0 for micro-batch 3, 0B3 its backward; on links they are what is"
    " sent. Tap a bar for its times."
)


def plan_page(plan: Plan, memory: MemoryReport | None) -> Page:
    """All that is to be seen of `plan`; `memory` is None where it cannot be replayed."""
    table = PlannedActivities(plan)
    sections: list[Section] = [key_figures(plan)]
    if plan.ops:
        sections += [planned_timeline(table), IdleTime(tuple(planned_idle(table)))]
    if memory is not None:
        sections.append(memory_over_time(memory, plan.period_ns))
    sections.append(stages(plan))
    if plan.solver.history:
        sections.append(search_progress(plan))
    return Page(f"Plan of {short(plan.chain.name, 60)}", _machines(plan), tuple(sections))


def _machines(plan: Plan) -> str:
    return f"{plan.semantics}, {tables.machines_line(plan.cluster)}"


def key_figures(plan: Plan) -> KeyFigures:
    """What the plan promises."""
    return KeyFigures(tuple(_figures(plan)))


def _figures(plan: Plan) -> Iterator[Figure]:
    bound, solver = tables.plan_bound(plan), plan.solver
    estimated = "times are estimates" if plan.chain.mode == "estimated" else ""
    yield Figure("period", "ns", plan.period_ns, remark=f"k = {plan.k}")
    per = float(plan.period_per_microbatch)
    yield Figure("period per micro-batch", "ns", per, remark=estimated)
    if bound is not None:
        yield Figure("proven bound on it", "ns", float(bound), remark=_proven(solver))
    if solver.gap is not None:
        yield Figure("gap", "share", solver.gap)
    batches = f"{plan.microbatches} micro-batches, update included"
    yield Figure("step", "ns", plan.step_ns, remark=batches)
    yield Figure("samples per second", "rate", tables.samples_per_second(plan))
    for row in plan.memory:
        name = short(plan.cluster.labels[row.gpu])
        remark = f"{(row.peak_bytes / max(1, row.budget_bytes)):.1%} of the budget"
        yield Figure(f"peak of {name}", "bytes", row.peak_bytes, remark=remark)


def _proven(solver: Solver) -> str:
    most = solver.most_microbatches
    limit = "" if most is None else f", with at most {most} micro-batches per step"
    return f"{solver.status}{limit}"


def planned_timeline(table: PlannedActivities) -> Timeline:
    """The plan's activities in its window."""
    window = table.window()
    what = "One step" if window.whole_step else "One period"
    lanes = lanes_of(table.plan, table.within(window), window, "planned")
    return Timeline(f"{what}, as planned", window.length_ns, lanes, LABELS)


def lanes_of(
    plan: Plan, activities: Iterable[Activity], window: Excerpt, source: Source
) -> tuple[Lane, ...]:
    """GPUs first, then the links and ways to the host that the plan uses."""
    rows = grid_rows(plan)
    place = {(op.kind, op.stage): index for index, row in enumerate(rows) for op in row.ops}
    found: dict[int, list[Activity]] = {index: [] for index in range(len(rows))}
    for activity in activities:
        home = plan.stages[activity.stage].gpu
        found[home if activity.kind == "OPT" else place[activity.kind, activity.stage]].append(
            activity
        )
    return tuple(
        Lane(
            row.name, source, tuple(_bar(activity, window) for activity in _in_order(found[index]))
        )
        for index, row in enumerate(rows)
    )


def _in_order(activities: Iterable[Activity]) -> list[Activity]:
    return sorted(activities, key=lambda activity: (activity.start_ns, activity.end_ns))


def _bar(activity: Activity, window: Excerpt) -> Bar:
    begin, number = window.begin_ns, activity.microbatch
    label = f"{activity.stage}{LETTER[activity.kind]}{number}" if activity.kind != "OPT" else "OPT"
    start, end = activity.start_ns - begin, activity.end_ns - begin
    return Bar(label, str(activity.kind), activity.stage, number, start, end, activity.waited_ns)


def planned_idle(table: PlannedActivities) -> Iterator[Idle]:
    """How the plan spends the time of each GPU in its window."""
    plan, window = table.plan, table.window()
    around = window if window.whole_step else window.wider(plan.period_ns)
    activities = [activity for activity in table.within(around) if computes(activity)]
    for index, name in enumerate(plan.cluster.labels):
        mine = (activity for activity in activities if activity.place == index)
        parts = spent(plan, mine, table, window)
        yield Idle(short(name), "planned", window.length_ns, parts)


def computes(activity: Activity) -> bool:
    """Whether it is work of a GPU, an update included."""
    return activity.kind == "OPT" or activity.kind.is_compute


def memory_over_time(report: MemoryReport, length_ns: int = 0) -> MemoryOverTime:
    """The curves of each GPU, and the terms at their peaks; predicted ones last `length_ns`."""
    series, rows = [], []
    for gpu, room in enumerate(report.gpus):
        name = short(room.name)
        series.append(
            _series(name, "planned", room.budget_bytes, report.predicted[gpu], length_ns)
        )
        if (found := measured_of(report, gpu)) is not None:
            series.append(_series(name, "measured", room.budget_bytes, found))
        rows += [
            TermRow(
                name,
                each.stage,
                purpose_name(each.purpose, each.stage),
                each.predicted,
                each.measured,
            )
            for each in compared(report, gpu)
        ]
    return MemoryOverTime(tuple(series), tuple(rows))


def _series(
    name: str, source: Source, budget: int, memory: GpuTerms, length_ns: int = 0
) -> MemorySeries:
    curve = memory.curve
    by_term = zip(*curve.sizes, strict=True) if curve.sizes else ()
    terms = tuple(zip(map(str, curve.purposes), by_term, strict=False))
    length = max(length_ns, *curve.times_ns[-1:], 0)
    peak = memory.peak
    return MemorySeries(
        name, source, budget, peak.size, peak.action, length, curve.times_ns, terms
    )


def stages(plan: Plan) -> Stages:
    """Which layers are where, how long they take there, what they do not keep."""
    times = {(op.kind, op.stage): op.duration_ns for op in plan.ops}
    shares = remat_shares(plan)
    return Stages(
        tuple(
            StageRow(
                stage.id,
                short(plan.cluster.labels[stage.gpu]),
                f"{spans([stage.layers])}: {_names(plan, stage)}",
                times.get((OpKind.F, stage.id), 0),
                sum(times.get((kind, stage.id), 0) for kind in (OpKind.B, OpKind.I, OpKind.W)),
                "; ".join(filter(None, (share.recomputed, share.on_host))) or None,
            )
            for stage, share in zip(plan.stages, shares, strict=True)
        )
    )


def _names(plan: Plan, stage: Stage) -> str:
    first, last = (short(plan.chain.layers[each].name, 32) for each in stage.layers)
    return first if stage.first == stage.last else f"{first} to {last}"


def search_progress(plan: Plan) -> SearchProgress:
    """What the search found, and when."""
    return SearchProgress(
        tuple(
            SearchStep(each.work_s, each.strategy, _float(each.period_ns), _float(each.bound_ns))
            for each in plan.solver.history
        )
    )


def _float(value: Rational | None) -> float | None:
    return None if value is None else float(tables.fraction(value))
