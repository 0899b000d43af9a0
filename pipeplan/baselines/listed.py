"""Schedules given as lists: what each GPU computes, in order, for one step with a flush.

The simulator's eager clock decides when: transfers go as soon as they can, receives are posted in
time. One step from fill to drain then is the period of a plan with k = all its micro-batches (T6),
so that a GPipe or zero-bubble schedule is judged, shown and run like any other plan.

A list may tell a backward as B or as its halves I and W. Halves stay where the stage may be split
(S1). Elsewhere the backward is whole: in I's place, since the stage before waits for it; in the
first stage in W's place, since nobody waits for I there (torch's first stage computes nothing in I
either).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pipeplan.baselines.timed import timed
from pipeplan.errors import InputError
from pipeplan.plan import OpKind, Plan, Stage
from pipeplan.program import Action, ActionKind, Program
from pipeplan.simulator import Simulation, replay
from pipeplan.simulator.tape import Ops, number

ListedOp = tuple[OpKind, int, int]
"""(F, B, I or W, stage, micro-batch)."""
Lists = Sequence[Sequence[ListedOp]]
"""Per GPU, what it computes in order."""

MOST = 1024
"""Micro-batches per step: a plan's period holds no more."""


@dataclass(frozen=True, slots=True)
class ListedSchedule:
    """A schedule that is known by its lists."""

    lists: Callable[[int, int], Lists]
    """(GPUs, micro-batches) -> lists; an `InputError` where the schedule is not made for them."""
    place: Callable[[int], Sequence[int]]
    """Number of GPUs -> the GPU of each stage."""
    detail: str = ""
    """What tells it from others of its name."""


def listed_plan(outline: Plan, lists: Lists, microbatches: int) -> Plan:
    """The plan of one step of `microbatches` micro-batches that executes `lists`.

    Args:
        outline: stages on GPUs, semantics flush (`Setting.outline`); a stage whose list has I
            becomes split where it may be.
        lists: every forward and backward of every stage and micro-batch once, on the stage's GPU,
            each kind of op in the order of micro-batches (R5).
        microbatches: per step.

    Raises:
        InputError: if there are more micro-batches than a plan can hold, or if the lists have
            halves and no stage may be split.
        DeadlockError: if GPUs wait for each other for ever.
    """
    if not 1 <= microbatches <= MOST:
        raise InputError(f"flush: got {microbatches} micro-batches per step, need 1 to {MOST}")
    step = _split_as_listed(outline, lists).model_copy(update={"microbatches": microbatches})
    simulation = replay_lists(step, lists)
    ops = Ops.of(step)
    times = {
        op: _known_times(simulation.times.start[op])
        for op, present in enumerate(ops.present)
        if present
    }
    last = max(starts[-1] for starts in times.values())
    return timed(step, ops, times, microbatches, max(last + 1, simulation.makespan_ns))


def replay_lists(outline: Plan, lists: Lists) -> Simulation:
    """The replay of `lists` on the eager clock, every message given room in time.

    Receives come first, sends behind their producers, frees last: so nothing waits but for its
    input; when bytes come and go is decided later, by the plan that the times make (`lowering`).
    """
    ops = Ops.of(outline)
    ranks = []
    for listed in lists:
        steps = list(_as_split(outline.stages, listed))
        receives = [action for step in steps for action in _receive(ops, step)]
        sends = [list(_send(ops, step)) for step in steps]
        computes = [
            action
            for (kind, stage, microbatch), sent in zip(steps, sends, strict=True)
            for action in (Action(ActionKind(kind), stage, microbatch), *sent)
        ]
        frees = [_free(action) for sent in sends for action in sent]
        ranks.append((*receives, *computes, *frees))
    return replay(outline, Program(tuple(ranks)))


def _split_as_listed(outline: Plan, lists: Lists) -> Plan:
    """`outline` with split backwards where `lists` have them and (S1) allows."""
    asked = {stage for listed in lists for kind, stage, _ in listed if kind is OpKind.I}
    exact, stages = outline.memory_model == "exact", outline.stages
    split = {s for s in asked if exact and outline.chain.may_split(*stages[s].layers)}
    if asked and not split:
        raise InputError(f"chain {outline.chain.name!r}: {_why_whole(outline)}")
    asked_for = tuple(
        stage.model_copy(update={"split_backward": stage.id in split}) for stage in stages
    )
    return outline.model_copy(update={"stages": asked_for})


def _why_whole(outline: Plan) -> str:
    """Why no backward is split."""
    if outline.memory_model != "exact":
        return "got the paper's memory model, need the exact one for split backwards"
    return (
        "got no stage behind the first whose layers all tell backward_weight_ns and"
        " saved_for_weight_bytes"
    )


def _as_split(stages: Sequence[Stage], listed: Sequence[ListedOp]) -> Iterator[ListedOp]:
    """The list of a GPU with backwards whole or in halves, as the stages have them."""
    for kind, stage, microbatch in listed:
        if kind is OpKind.F:
            yield kind, stage, microbatch
        elif stages[stage].split_backward:
            for half in (OpKind.I, OpKind.W) if kind is OpKind.B else (kind,):
                yield half, stage, microbatch
        elif kind in (OpKind.B, OpKind.I if stage else OpKind.W):
            yield OpKind.B, stage, microbatch


def _receive(ops: Ops, step: ListedOp) -> Iterator[Action]:
    kind, stage, microbatch = step
    before = ops.before[number(kind, stage)]
    if before >= 0 and ops.kind(before).is_send:
        message = ActionKind.RECV_F if kind is OpKind.F else ActionKind.RECV_B
        yield Action(message, stage, microbatch)


def _send(ops: Ops, step: ListedOp) -> Iterator[Action]:
    kind, stage, microbatch = step
    after = ops.after[number(kind, stage)]
    if after >= 0 and ops.kind(after).is_send:
        yield Action(ActionKind(ops.kind(after)), stage, microbatch)


def _free(sent: Action) -> Action:
    kind = ActionKind.FREE_F if sent.kind is ActionKind.SEND_F else ActionKind.FREE_B
    return Action(kind, sent.stage, sent.microbatch)


def _known_times(times: Sequence[int | None]) -> list[int]:
    """The times of an op that every micro-batch passed.

    Raises:
        InputError: if one did not.
    """
    found = [time for time in times if time is not None]
    if len(found) < len(times):
        raise InputError("flush: got lists that leave out an op, need every op once")
    return found
