"""actions.json: one step of the run, action by action, of all ranks.

Every rank keeps its last actions anyway (`FlightRecorder`). When the run is over, the rank with
the loss chooses a step, the one of median length of those that it has kept, and all ranks tell
theirs of it. Under 2bw steps overlap, so that the two steps beside it are told, too. Ranks on
several machines are put on one axis by their machines' clocks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from pipeplan.action_times import ActionTimes, TimedAction
from pipeplan.plan import Plan
from pipeplan.program import ActionKind
from pipeplan.runtime.supervision.flight_recorder import Recorded, now_ns


class ChosenStep(NamedTuple):
    """A step, counted from 0, and how long the steps were that it is the median of."""

    step: int
    lengths_ns: tuple[int, ...]


def gathered(
    plan: Plan,
    rank: int,
    recorded: Sequence[Recorded],
    gather: Callable[[object], list[Any]],
    settled: int,
) -> ActionTimes | None:
    """The same on all ranks, which all call it; None where the run was too short to tell.

    Args:
        plan: what was run.
        rank: this one.
        recorded: its last actions.
        gather: gives the values of all ranks of the pipeline.
        settled: the first step that is like most others.
    """
    tells = rank == plan.stages[-1].gpu
    answers = gather(chosen(plan, recorded, settled) if tells else None)
    choice: ChosenStep | None = answers[plan.stages[-1].gpu]
    if choice is None:
        return None
    reach = 1 if plan.semantics == "2bw" else 0
    steps = range(choice.step - reach, choice.step + reach + 1)
    since = time.time_ns() - now_ns()
    mine = [
        (str(each.action), each.start_ns + since, each.waited_ns, each.end_ns + since)
        for step, each in by_step(recorded, plan.microbatches)
        if step in steps
    ]
    ranks: list[list[tuple[str, int, int, int]]] = gather(mine)
    begin = min(start for each in ranks for _, start, _, _ in each)
    return ActionTimes(
        plan_digest=plan.digest(),
        semantics=plan.semantics,
        microbatches=plan.microbatches,
        step=choice.step + 1,
        lengths_ns=choice.lengths_ns,
        ranks=tuple(
            tuple(
                TimedAction(
                    action=name, start_ns=start - begin, waited_ns=waited, end_ns=end - begin
                )
                for name, start, waited, end in each
            )
            for each in ranks
        ),
    )


def by_step(recorded: Sequence[Recorded], microbatches: int) -> list[tuple[int, Recorded]]:
    """Each action with its step; an update has that of the action before it."""
    step, found = -1, []
    for each in recorded:
        if each.action.microbatch is not None:
            step = each.action.microbatch // microbatches
        found.append((step, each))
    return found


def chosen(plan: Plan, recorded: Sequence[Recorded], settled: int) -> ChosenStep | None:
    """A step of median length, of those from `settled` on, or of all if there are no such.

    The last step that was kept has none behind it, which would end it. Under 2bw the step before
    is told as well, and the one behind must not empty the pipeline.
    """
    last, size = len(plan.stages) - 1, plan.microbatches
    begins = {
        each.action.microbatch // size: each.start_ns + each.waited_ns
        for each in recorded
        if each.action.kind is ActionKind.F
        and each.action.stage == last
        and each.action.microbatch is not None
        and each.action.microbatch % size == 0
    }
    known = sorted(begins)
    lengths = {step: begins[step + 1] - begins[step] for step in known if step + 1 in begins}
    if plan.semantics == "2bw":
        lengths = {
            step: length
            for step, length in lengths.items()
            if step - 1 in begins and step + 2 in begins
        }
    if not lengths:
        return None
    later = {step: length for step, length in lengths.items() if step >= settled}
    lengths = later or lengths
    ranked = sorted(lengths, key=lambda step: lengths[step])
    return ChosenStep(
        ranked[(len(ranked) - 1) // 2], tuple(lengths[step] for step in sorted(lengths))
    )
