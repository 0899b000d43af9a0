"""When each operation of a plan happens, for any micro-batch, and windows to look through.

Micro-batch m = copy + k * j starts at (j + shift) * period + start, (T1) of
docs/reference/model.md; under flush micro-batches 0..m-1 of a step do, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from pipeplan.errors import InvalidPlanError
from pipeplan.plan import Op, OpKind, Plan
from pipeplan.simulator import Span, updates_ns
from pipeplan.units import ceil_div

Place = int | tuple[int, int]
"""A GPU, or (from, to) of a link."""
MOST_BARS = 2000
"""A step with more bars than this is shown by one of its periods."""


@dataclass(frozen=True, slots=True)
class Activity:
    """One operation or transfer of one micro-batch, in ns."""

    kind: OpKind | Literal["OPT"]
    stage: int
    microbatch: int
    """Of an update the last one that it takes in."""
    place: Place
    start_ns: int
    end_ns: int
    waited_ns: int = 0
    """Before `start_ns`, for the input; of measured ones."""

    @property
    def length_ns(self) -> int:
        """How long it takes."""
        return self.end_ns - self.start_ns


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A part of the plan's time: [begin_ns, end_ns)."""

    begin_ns: int
    end_ns: int
    whole_step: bool
    """Whether it is a step from fill to drain, updates included."""

    @property
    def length_ns(self) -> int:
        """How long it is."""
        return self.end_ns - self.begin_ns

    def wider(self, by_ns: int) -> Excerpt:
        """So much more before and behind."""
        return replace(self, begin_ns=self.begin_ns - by_ns, end_ns=self.end_ns + by_ns)

    def clip(self, activity: Activity) -> tuple[int, int]:
        """The part of `activity` that lies in it; an empty one at its nearer end, if none does."""
        begin, end = self.begin_ns, self.end_ns
        return min(max(activity.start_ns, begin), end), min(max(activity.end_ns, begin), end)


def replayed(spans: Iterable[Span]) -> Iterator[Activity]:
    """What a replay did."""
    for span in spans:
        yield Activity(
            span.kind, span.stage, span.microbatch, span.place, span.start_ns, span.end_ns
        )


class Activities(Protocol):
    """Finds an activity by what happens; None where it does not or nobody knows."""

    def __call__(self, kind: OpKind, stage: int, microbatch: int) -> Activity | None:
        """The activity."""


class PlannedActivities:
    """The planned activities of all micro-batches."""

    def __init__(self, plan: Plan) -> None:
        """Reads the ops of `plan`."""
        self.plan = plan
        self._ops = {(op.kind, op.stage, op.copy_): op for op in plan.ops}
        self._flush = plan.semantics == "flush"

    def __call__(self, kind: OpKind, stage: int, microbatch: int) -> Activity | None:
        """See `Activities`."""
        if self._flush and not 0 <= microbatch < self.plan.microbatches:
            return None
        op = self._ops.get((kind, stage, microbatch % self.plan.k))
        return None if op is None else self._activity(op, microbatch // self.plan.k)

    def _activity(self, op: Op, turn: int) -> Activity:
        place = op.link or op.gpu
        assert place is not None
        start = (turn + op.shift) * self.plan.period_ns + op.start_ns
        microbatch = op.copy_ + self.plan.k * turn
        return Activity(op.kind, op.stage, microbatch, place, start, start + op.duration_ns)

    def window(self) -> Excerpt:
        """A whole step under flush where it has few bars; else a period in which every op runs."""
        plan = self.plan
        if self._flush and len(plan.ops) * plan.microbatches <= MOST_BARS * plan.k:
            return self.step()
        begin = max(op.shift for op in plan.ops) * plan.period_ns
        return Excerpt(begin, begin + plan.period_ns, whole_step=False)

    def step(self) -> Excerpt:
        """A step under flush, from its first start to the end of its updates, (T5)."""
        begin = min(self._activity(op, 0).start_ns for op in self.plan.ops)
        return Excerpt(begin, begin + self.plan.step_ns, whole_step=True)

    def within(self, window: Excerpt) -> Iterator[Activity]:
        """Every activity that shares an instant with `window`, or starts with it."""
        if window.whole_step:
            activities = [activity for op in self.plan.ops for activity in self._of_step(op)]
            yield from (*activities, *self._updates(activities))
            return
        for op in self.plan.ops:
            turn = window.begin_ns // self.plan.period_ns - op.shift - 1
            while (activity := self._activity(op, turn)).start_ns < window.end_ns:
                if activity.end_ns > window.begin_ns or activity.start_ns == window.begin_ns:
                    yield activity
                turn += 1

    def _of_step(self, op: Op) -> Iterator[Activity]:
        turns = range(ceil_div(self.plan.microbatches - op.copy_, self.plan.k))
        return (self._activity(op, turn) for turn in turns)

    def _updates(self, activities: Iterable[Activity]) -> Iterator[Activity]:
        """(T5): behind its last operation a GPU updates its stages, the last one first.

        None where a broken plan does not say how long: its stages are not sound, or when: its
        GPU computes nothing.
        """
        try:
            updates = updates_ns(self.plan)
        except InvalidPlanError:
            return
        ends: dict[Place, int] = {}
        for activity in activities:
            if activity.kind != "OPT" and activity.kind.is_compute:
                ends[activity.place] = max(
                    activity.end_ns, ends.get(activity.place, activity.end_ns)
                )
        for stage in reversed(self.plan.stages):
            begin = ends.get(stage.gpu)
            if begin is not None and updates[stage.id]:
                ends[stage.gpu] = end = begin + updates[stage.id]
                last = self.plan.microbatches - 1
                yield Activity("OPT", stage.id, last, stage.gpu, begin, end)
