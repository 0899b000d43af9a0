"""Why a GPU computes nothing: the same questions to a plan's activities and to those of a run.

A GPU idles before an operation while its input is still computed on another GPU (*other stages*),
while the input is on its way (*messages*), or though the input is there (*order*): the plan's
order, room in memory, and in a run what the process does between two operations. Before the first
operation of a step and behind the last one it idles for *fill and drain*.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from pipeplan.plan import OpKind, Plan
from pipeplan.report.page.schedule import Activities, Activity, Excerpt

WORK, FILL, STAGES, MESSAGES, ORDER = (
    "work",
    "fill and drain",
    "other stages",
    "messages",
    "order",
)
PARTS = (WORK, FILL, STAGES, MESSAGES, ORDER)


@dataclass(slots=True)
class Spent:
    """How much of a window a GPU spends on what, in ns."""

    parts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))

    def add(self, part: str, begin: int, end: int) -> int:
        """Counts [begin, end) unless it is empty; where the rest begins."""
        self.parts[part] += max(0, end - begin)
        return max(begin, end)


def spent(
    plan: Plan, computes: Iterable[Activity], find: Activities, window: Excerpt
) -> tuple[tuple[str, int], ...]:
    """What a GPU does with `window`, part by part; they add up to its length.

    Args:
        plan: whose activities they are.
        computes: those of the GPU in and around the window, updates included.
        find: the activities that inputs come from.
        window: in the time of the activities.
    """
    told, at = Spent(), window.begin_ns
    fills = window.whole_step
    for activity in sorted(computes, key=lambda each: (each.start_ns, each.end_ns)):
        begin, end = window.clip(activity)
        if fills:
            told.add(FILL, at, begin)
        else:
            _attribute(told, plan, activity, find, (at, begin))
        told.add(WORK, max(at, begin), end)
        at, fills = max(at, end), False
    told.add(FILL if window.whole_step else ORDER, at, window.end_ns)
    return tuple(told.parts.items())


def _attribute(
    told: Spent, plan: Plan, activity: Activity, find: Activities, gap: tuple[int, int]
) -> None:
    """Says what `activity` waited for in `gap`, which ends when it starts."""
    at, until = gap
    for part, source in sources(plan, activity, find):
        if source is not None:
            at = told.add(part, at, min(until, source.end_ns))
    told.add(ORDER, at, until)


def sources(
    plan: Plan, activity: Activity, find: Activities
) -> Iterator[tuple[str, Activity | None]]:
    """What the input of `activity` comes from and by, in the order in which it happens."""
    stage, number, last = activity.stage, activity.microbatch, len(plan.stages) - 1
    if activity.kind is OpKind.F and stage:
        yield STAGES, find(OpKind.F, stage - 1, number)
        yield MESSAGES, find(OpKind.SEND_F, stage - 1, number)
    elif activity.kind in (OpKind.B, OpKind.I):
        if stage < last:
            yield STAGES, find(plan.stages[stage + 1].backward, stage + 1, number)
            yield MESSAGES, find(OpKind.SEND_B, stage + 1, number)
        yield MESSAGES, find(OpKind.PREFETCH, stage, number)
