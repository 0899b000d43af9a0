"""Which operations of a run were late, and why: an exact account of each delay.

An operation X that follows P on its GPU starts at end(P) + wait + rest, where it waits for its
input and the rest is what the process does between the two. The plan has it start a planned gap
behind P. So what X is later than P was is

    (P took longer than planned) + wait + rest - planned gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from pipeplan.plan import Plan
from pipeplan.report.page.idle import STAGES, sources
from pipeplan.report.page.run_sections import Delay, Duration
from pipeplan.report.page.schedule import Activities, Activity, Excerpt

Pair = tuple[Activity, Activity]
"""The same operation, planned and measured."""


def delays(
    plan: Plan, pairs: Iterable[Pair], measured: Activities, windows: tuple[Excerpt, Excerpt]
) -> Iterator[Delay]:
    """One of each operation of a GPU but the first, in the order of the run.

    Args:
        plan: what was run.
        pairs: the operations of one GPU, in that order.
        measured: the operations of all GPUs.
        windows: the planned and the measured excerpt, which begin together.
    """
    begin, real_begin = (window.begin_ns for window in windows)
    for (told_before, before), (told, done) in pairwise(pairs):
        gap = done.start_ns - before.end_ns
        waited = min(done.waited_ns, max(0, gap))
        yield Delay(
            label=label(done),
            gpu=plan.cluster.labels[plan.stages[done.stage].gpu],
            planned_ns=told.start_ns - begin,
            measured_ns=done.start_ns - real_begin,
            before=label(before),
            longer_ns=(before.end_ns - before.start_ns)
            - (told_before.end_ns - told_before.start_ns),
            waited_ns=waited,
            waited_for=_waited_for(plan, done, measured) if waited else None,
            between_ns=gap - waited,
            gap_ns=told.start_ns - told_before.end_ns,
        )


def label(activity: Activity) -> str:
    """`0F3`: stage, kind, micro-batch."""
    return f"{activity.stage}{activity.kind}{activity.microbatch}"


def _waited_for(plan: Plan, activity: Activity, find: Activities) -> str | None:
    """The operation on another GPU that made the input."""
    made = (source for part, source in sources(plan, activity, find) if part == STAGES)
    return next((label(source) for source in made if source is not None), None)


def durations(plan: Plan, pairs: Iterable[Pair]) -> Iterator[Duration]:
    """Of each kind of operation of each stage: planned and measured time."""
    found: dict[tuple[int, str], list[Pair]] = {}
    for told, done in pairs:
        found.setdefault((done.stage, str(done.kind)), []).append((told, done))
    for (stage, kind), mine in sorted(found.items()):
        lengths = [done.length_ns for _, done in mine]
        told, _ = mine[0]
        yield Duration(
            gpu=plan.cluster.labels[plan.stages[stage].gpu],
            operation=f"{stage}{kind}",
            count=len(mine),
            planned_ns=told.length_ns,
            mean_ns=sum(lengths) / len(lengths),
            longest_ns=max(lengths),
        )
