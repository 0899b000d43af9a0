"""What a run did in one step, in the words of a plan: activities within an excerpt of time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from pipeplan.action_times import ActionTimes, TimedAction
from pipeplan.errors import InputError
from pipeplan.plan import OpKind, Plan
from pipeplan.program import Action, ActionKind
from pipeplan.report.page.schedule import Activity, Excerpt, PlannedActivities

_COMPUTES = {
    ActionKind.F: OpKind.F,
    ActionKind.B: OpKind.B,
    ActionKind.I: OpKind.I,
    ActionKind.W: OpKind.W,
}
_SENDS = {ActionKind.SEND_F: OpKind.SEND_F, ActionKind.SEND_B: OpKind.SEND_B}
NOTICED_NS = 200_000
"""A shorter wait is the question alone: the message had come, and nobody knows when."""
_Key = tuple[OpKind, int, int]


@dataclass(slots=True)
class MeasuredActivities:
    """The computes of a run in and around one step, and the messages that somebody waited for."""

    plan: Plan
    computes: list[Activity] = field(default_factory=list)
    """Of all GPUs, in the order of each."""
    messages: list[Activity] = field(default_factory=list)
    """From the SEND to the end of the wait."""
    known: dict[_Key, Activity] = field(default_factory=dict)

    def __call__(self, kind: OpKind, stage: int, microbatch: int) -> Activity | None:
        """See `Activities`."""
        return self.known.get((kind, stage, microbatch))

    @classmethod
    def of(cls, plan: Plan, times: ActionTimes) -> MeasuredActivities:
        """Those in `times`; under flush micro-batches count from the step's first.

        Raises:
            InputError: if the actions are none of the plan.
        """
        made = cls(plan)
        offset = times.first if plan.semantics == "flush" else 0
        sends: dict[_Key, int] = {}
        for rank, actions in enumerate(times.ranks):
            latest = 0
            for each in actions:
                action = _checked(plan, rank, each)
                latest = latest if action.microbatch is None else action.microbatch - offset
                made._take(rank, action.kind, action.stage, latest, each)
                if action.kind in _SENDS:
                    sends[_SENDS[action.kind], action.stage, latest] = each.start_ns
        made._find_messages(sends)
        return made

    def _take(
        self, rank: int, kind: ActionKind, stage: int, microbatch: int, each: TimedAction
    ) -> None:
        begin, waited = each.start_ns + each.waited_ns, each.waited_ns
        if kind is ActionKind.OPT:
            update = Activity("OPT", stage, microbatch, rank, begin, each.end_ns, waited)
            self.computes.append(update)
        elif kind in _COMPUTES:
            op = _COMPUTES[kind]
            done = Activity(op, stage, microbatch, rank, begin, each.end_ns, waited)
            self.computes.append(done)
            self.known[op, stage, microbatch] = done

    def _find_messages(self, sends: dict[_Key, int]) -> None:
        """When a message came is known where its receiver waited for it."""
        for (kind, stage, microbatch), start in sends.items():
            forward = kind is OpKind.SEND_F
            other = stage + 1 if forward else stage - 1
            taker = OpKind.F if forward else self.plan.stages[other].backward
            taken = self.known.get((taker, other, microbatch))
            if taken is None or taken.waited_ns < NOTICED_NS or taken.start_ns < start:
                continue
            link = self.plan.stages[stage].gpu, self.plan.stages[other].gpu
            came = Activity(kind, stage, microbatch, link, start, taken.start_ns)
            self.messages.append(came)
            self.known[kind, stage, microbatch] = came

    def excerpt(self, times: ActionTimes) -> Excerpt:
        """The step: all of it under flush, else from its first forward of the last stage on."""
        if self.plan.semantics == "flush":
            begin = min(each.start_ns for each in self.computes)
            return Excerpt(begin, max(each.end_ns for each in self.computes), whole_step=True)
        begin, end = (self._entry(number) for number in _ends(times))
        return Excerpt(begin, end, whole_step=False)

    def _entry(self, microbatch: int) -> int:
        found = self(OpKind.F, len(self.plan.stages) - 1, microbatch)
        if found is None:
            raise InputError(
                f"actions.json: got no forward of the last stage for micro-batch {microbatch},"
                " need it. Train again."
            )
        return found.start_ns

    def within(self, excerpt: Excerpt) -> Iterator[Activity]:
        """Every activity that shares an instant with `excerpt`."""
        for each in (*self.computes, *self.messages):
            if each.end_ns > excerpt.begin_ns and each.start_ns < excerpt.end_ns:
                yield each


def planned_excerpt(planned: PlannedActivities, times: ActionTimes) -> Excerpt:
    """The same part of the plan's time."""
    plan = planned.plan
    if plan.semantics == "flush":
        return planned.step()
    last = len(plan.stages) - 1
    begin, end = (planned(OpKind.F, last, number) for number in _ends(times))
    assert begin is not None
    assert end is not None
    return Excerpt(begin.start_ns, end.start_ns, whole_step=False)


def _ends(times: ActionTimes) -> tuple[int, int]:
    """The first micro-batches of the step and of the one behind it."""
    return times.first, times.first + times.microbatches


def _checked(plan: Plan, rank: int, each: TimedAction) -> Action:
    action = each.parsed
    if action.stage >= len(plan.stages) or plan.stages[action.stage].gpu != rank:
        raise InputError(
            f"actions.json: got {each.action} on rank {rank}, need actions of the plan in"
            " plan.json. Both come from one run."
        )
    return action
