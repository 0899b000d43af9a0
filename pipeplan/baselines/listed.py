"""Schedules given as lists: what each GPU computes, in order, for one step with a flush.

The simulator's eager clock decides when: transfers go as soon as they can, receives are posted in
time. One step from fill to drain then is the period of a plan with k = all its micro-batches, so
that a GPipe or interleaved schedule is judged, shown and run like any other plan.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pipeplan.baselines.timed import in_order, timed
from pipeplan.errors import InputError
from pipeplan.plan import OpKind, Plan
from pipeplan.program import Action, ActionKind, Program
from pipeplan.simulator import Simulation, replay
from pipeplan.simulator.tape import Ops, number

ListedOp = tuple[OpKind, int, int]
"""(F or B, stage, micro-batch)."""
Lists = Sequence[Sequence[ListedOp]]
"""Per GPU, what it computes in order."""

MOST = 1024
"""Micro-batches per step: a plan's period holds no more."""


def listed_plan(outline: Plan, lists: Lists, microbatches: int) -> Plan:
    """The plan of one step of `microbatches` micro-batches that executes `lists`.

    Args:
        outline: stages on GPUs, semantics flush (`Setting.outline`).
        lists: every F and B of every stage and micro-batch once, on the stage's GPU.
        microbatches: per step.

    Raises:
        InputError: if there are more micro-batches than a plan can hold.
        DeadlockError: if GPUs wait for each other for ever.
    """
    check_count(microbatches)
    simulation = replay_lists(outline, lists)
    ops = Ops.of(outline)
    times = {op: known_times(simulation.times.start[op]) for op in in_order(ops)}
    period = max(1, simulation.makespan_ns)
    step = outline.model_copy(update={"microbatches": microbatches})
    return timed(step, ops, times, microbatches, period)


def replay_lists(outline: Plan, lists: Lists) -> Simulation:
    """The replay of `lists` on the eager clock, every message given room in time."""
    return replay(outline, program(outline, lists))


def program(
    outline: Plan, lists: Lists, behind: Callable[[ListedOp], Sequence[Action]] = lambda _: ()
) -> Program:
    """Actions around the computes: receives first, sends behind their producers, frees last.

    So nothing waits but for its input; when bytes come and go is decided later, by the plan that
    the times make (`lowering`). `behind` gives more actions to put behind a step and its send.
    """
    ops = Ops.of(outline)
    ranks = []
    for steps in lists:
        receives = [action for step in steps for action in _receive(ops, step)]
        sends = [list(_send(ops, step)) for step in steps]
        computes = [
            action
            for (kind, stage, microbatch), sent in zip(steps, sends, strict=True)
            for action in (
                Action(ActionKind(kind), stage, microbatch),
                *sent,
                *behind((kind, stage, microbatch)),
            )
        ]
        frees = [_free(action) for sent in sends for action in sent]
        ranks.append((*receives, *computes, *frees))
    return Program(tuple(ranks))


def check_count(microbatches: int) -> None:
    """Refuse more micro-batches per step than the period of a plan can hold.

    Raises:
        InputError: if there are.
    """
    if not 1 <= microbatches <= MOST:
        raise InputError(f"flush: got {microbatches} micro-batches per step, need 1 to {MOST}")


def _receive(ops: Ops, step: ListedOp) -> Iterator[Action]:
    kind, stage, microbatch = step
    before = ops.before[number(kind, stage)]
    if before >= 0 and not ops.kind(before).is_compute:
        yield Action(ActionKind(f"RECV_{kind}"), stage, microbatch)


def _send(ops: Ops, step: ListedOp) -> Iterator[Action]:
    kind, stage, microbatch = step
    after = ops.after[number(kind, stage)]
    if after >= 0 and not ops.kind(after).is_compute:
        yield Action(ActionKind(f"SEND_{kind}"), stage, microbatch)


def _free(sent: Action) -> Action:
    kind = ActionKind.FREE_F if sent.kind is ActionKind.SEND_F else ActionKind.FREE_B
    return Action(kind, sent.stage, sent.microbatch)


def known_times(times: Sequence[int | None]) -> list[int]:
    """The times of an op that every micro-batch passed.

    Raises:
        InputError: if one did not.
    """
    found = [time for time in times if time is not None]
    if len(found) < len(times):
        raise InputError("flush: got lists that leave out an op, need every F and B once")
    return found
