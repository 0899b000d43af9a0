"""Dry runs on the virtual clock, held against the simulator's eager clock."""

from __future__ import annotations

from dataclasses import replace

from pipeplan import lowering
from pipeplan.plan import OpKind, Plan
from pipeplan.program import Action, ActionKind, Pattern
from pipeplan.runtime.dry_run.planned_times import PlannedTimes
from pipeplan.runtime.dry_run.run import dry_run, make_clock
from pipeplan.runtime.transport.base import Transport
from pipeplan.simulator import Simulation, simulate
from pipeplan.simulator.tape import number
from tests import pipelines

Ends = list[tuple[str, int]]
"""(action, end in ns) in the order of a rank's list."""

_LASTING = {
    ActionKind.F: OpKind.F,
    ActionKind.B: OpKind.B,
    ActionKind.I: OpKind.I,
    ActionKind.W: OpKind.W,
    ActionKind.FREE_F: OpKind.SEND_F,
    ActionKind.FREE_B: OpKind.SEND_B,
    ActionKind.FREE_O: OpKind.OFFLOAD,
}


def ran(
    plan: Plan, pattern: Pattern, steps: int, transport: Transport, *, updates: bool = True
) -> Ends:
    """What one rank does on the virtual clock, and when."""
    run = dry_run(
        plan,
        pattern,
        steps,
        pipelines.Listener(),
        make_clock("virtual"),
        times=PlannedTimes.of(plan, updates=updates),
        memory=10**6,
    )
    run.run(transport)
    return [(str(action), end) for action, _, end, _ in run.recorder.last()]


def simulated(plan: Plan, pattern: Pattern, steps: int, *, updates: bool = True) -> list[Ends]:
    """What the simulator says, rank by rank."""
    told = simulate(
        plan, pattern, microbatches=steps * pattern.microbatches, clock="eager", updates=updates
    )
    program = pattern.unroll(told.microbatches)
    return [_ends(rank, actions, told, updates) for rank, actions in enumerate(program.ranks)]


def without_updates(plan: Plan, steps: int) -> tuple[Plan, Pattern]:
    """One long flow: as the simulator measures a period, no update and no drain inside."""
    long = plan.model_copy(update={"microbatches": steps * plan.microbatches})
    return long, replace(lowering.lower(plan), microbatches=long.microbatches)


def _ends(rank: int, actions: tuple[Action, ...], told: Simulation, updates: bool) -> Ends:
    """A rank is done with an action when the simulator is, or with the action before it."""
    times = told.times
    ends: Ends = []
    now = 0
    for index, action in enumerate(actions):
        kind = _LASTING.get(action.kind)
        if action.microbatch is None:
            now = max(now, times.when[rank][index])
            now += times.ops.update[action.stage] if updates else 0
        elif kind is not None:
            end = times.end[number(kind, action.stage)][action.microbatch]
            assert end is not None
            now = max(now, end)
        ends.append((str(action), now))
    return ends
