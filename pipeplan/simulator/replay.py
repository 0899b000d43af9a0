"""Runs a program: `simulate` the pattern of a plan, `replay` any finite program."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from pipeplan.errors import InputError
from pipeplan.plan import Plan
from pipeplan.program import Pattern, Program
from pipeplan.simulator import costs
from pipeplan.simulator.due import due_times, link_order
from pipeplan.simulator.engine import Engine
from pipeplan.simulator.links import PlannedLinks, QueueLinks, Resource
from pipeplan.simulator.planned import Planned, inspect, inspect_stages
from pipeplan.simulator.recompute import condensed
from pipeplan.simulator.report import late, report
from pipeplan.simulator.result import Clock, Simulation, refuse_invalid
from pipeplan.simulator.riding import stages_once
from pipeplan.simulator.stall import explain
from pipeplan.simulator.tape import Does, Entry, Ops, OpTimes, record
from pipeplan.simulator.window import Window
from pipeplan.units import ceil_div


def simulate(
    plan: Plan,
    pattern: Pattern,
    *,
    microbatches: int | None = None,
    clock: Clock = "plan",
    updates: bool = False,
    op_times: OpTimes | None = None,
) -> Simulation:
    """Replays `pattern`, the lowered `plan`, from empty to empty.

    On the plan clock computes and transfers start when the plan says, and one that cannot is an
    error; on the eager clock each starts as soon as its inputs, the order of its rank and link,
    and the posting of its receive allow. Unless `updates` is on, no update interrupts the flow:
    under 2bw each B is followed by an optimizer instant that takes no time (any of them may be
    the one), under flush one follows the drain.

    Args:
        plan: what times and bytes follow from.
        pattern: what each rank does.
        microbatches: how many to replay; None takes enough for a steady state.
        clock: `plan` or `eager`.
        updates: eager only: optimizer steps as the pattern has them, and they take their time.
        op_times: eager only: how long some ops last, in place of what the plan says.

    Raises:
        InvalidPlanError: if the plan cannot be replayed, or on the plan clock something cannot
            happen when the plan says; `violations` holds the discrepancies.
        DeadlockError: if ranks wait for each other for ever.
        InputError: if pattern and plan do not belong together, or the replay is too long.
    """
    given, plan = plan, _condensed(plan, clock)
    refuse_invalid(list(inspect(plan)), clock)
    _check_pattern(plan, pattern)
    if updates and clock == "plan":
        raise InputError("simulate: got updates on the plan clock, need the eager clock for them")
    if op_times and clock == "plan":
        raise InputError("simulate: got times of ops on the plan clock, need the eager clock")
    ops = Ops.of(plan)
    planned = Planned.of(plan, ops)
    if not {action.shift for rank in pattern.ranks for action in rank} <= {0, 1}:
        planned = replace(planned, steps=False)  # a pattern that reaches further than the plan
    count = _enough(plan, planned, ops, updates) if microbatches is None else microbatches
    _check_count(count, pattern)
    if not updates:
        pattern = replace(pattern, microbatches=1 if plan.semantics == "2bw" else count)
    flow = min(count, pattern.microbatches) if plan.semantics == "flush" else count
    program = pattern.unroll(count)
    tapes, _ = record(program, ops)
    resources = _resources(plan, ops)
    ops = ops.lasting(op_times or {})
    links = PlannedLinks(
        link_order(planned, ops, resources, tapes, flow),
        resources,
        ops.duration,
        planned.at if clock == "plan" else None,
    )
    due = due_times(planned, tapes) if clock == "plan" else None
    engine = Engine(ops, tapes, count, links, due=due, updates=updates)
    if not engine.run():
        raise explain(program, engine, links)
    every = plan.microbatches if updates and plan.semantics == "2bw" else 1
    window = Window.of(engine.times, plan.k, flow, every, planned if due is not None else None)
    once = partial(stages_once, given, plan)
    result = report(plan, clock, program, engine, window, updates, once)
    if clock == "plan":
        refuse_invalid([*late(program, engine, links), *result.discrepancies], clock)
    return result


def replay(plan: Plan, program: Program, *, updates: bool = False) -> Simulation:
    """Runs a finite program, hand-written or unrolled, on the eager clock.

    A link takes whatever is ready first. The plan gives stages, durations and bytes; its times
    are not looked at.

    Raises:
        InputError: if the program names what the plan does not have, or names it twice, or has
            not one line for each GPU.
        DeadlockError: if ranks wait for each other for ever.
        InvalidPlanError: if the plan's stages are not sound.
    """
    given, plan = plan, _condensed(plan, "eager")
    refuse_invalid([each for each in inspect(plan) if each.what == "tied"], "eager")
    ops = Ops.of(plan)
    tapes, count = record(program, ops)
    _check_once(program, tapes)
    if len(program.ranks) != len(plan.cluster.gpus):
        raise InputError(
            f"program: got {len(program.ranks)} ranks, need {len(plan.cluster.gpus)}, one for each"
            " GPU of the plan. A rank without actions has an empty line."
        )
    links = QueueLinks(_resources(plan, ops), ops.duration)
    engine = Engine(ops, tapes, count, links, updates=updates)
    if not engine.run():
        raise explain(program, engine, links)
    window = Window.of(engine.times, plan.k, count, 1, None)
    once = partial(stages_once, given, plan)
    return report(plan, "eager", program, engine, window, updates, once)


def updates_ns(plan: Plan) -> tuple[int, ...]:
    """How long each stage's optimizer step holds its rank, in ns (T5).

    Raises:
        InvalidPlanError: if the plan's stages are not sound.
    """
    charged = _condensed(plan, "plan")
    return tuple(costs.update_ns(charged, stage) for stage in range(len(charged.stages)))


def _condensed(plan: Plan, clock: Clock) -> Plan:
    """The plan as the replay charges it: what is computed again is one layer."""
    refuse_invalid(list(inspect_stages(plan)), clock)
    return condensed(plan)


def _enough(plan: Plan, planned: Planned, ops: Ops, updates: bool) -> int:
    """Micro-batches for a steady state; with updates whole steps, and under flush one."""
    least = planned.least(ops)
    if not updates:
        # More periods say nothing new of steps that nothing passes between.
        return plan.k * (least if planned.steps else least + 8)
    if plan.semantics == "flush":
        return plan.microbatches
    return (ceil_div(plan.k * least, plan.microbatches) + 4 * plan.k) * plan.microbatches


def _check_count(count: int, pattern: Pattern) -> None:
    most = pattern.most_unrolled
    if not 1 <= count <= most:
        raise InputError(
            f"simulate: got {count} micro-batches, need 1 to {most}: a replay keeps every action."
            " Give their number, or plan for fewer in flight."
        )


def _check_pattern(plan: Plan, pattern: Pattern) -> None:
    hosted = tuple(
        tuple(stage.id for stage in plan.hosted(gpu)) for gpu in range(len(plan.cluster.gpus))
    )
    got = (pattern.k, pattern.semantics, pattern.microbatches, pattern.hosted)
    need = (plan.k, plan.semantics, plan.microbatches, hosted)
    if got != need:
        raise InputError(f"simulate: got the pattern of another plan: {got}, need {need}")


def _check_once(program: Program, tapes: list[list[Entry]]) -> None:
    for rank, tape in enumerate(tapes):
        seen: set[Entry] = set()
        for index, entry in enumerate(tape):
            if entry in seen and entry[0] != Does.OPT:
                raise InputError(
                    f"program: rank {rank}: got {program.ranks[rank][index]} twice, need it once"
                )
            seen.add(entry)


def _resources(plan: Plan, ops: Ops) -> dict[int, Resource]:
    """What each transfer excludes others on; under full duplex each way to the host is two."""
    host, found = plan.cluster.host, dict[int, Resource]()
    for op, place in enumerate(ops.place):
        if isinstance(place, tuple):
            found[op] = plan.cluster.links.resource(*place)
        elif host is not None and ops.present[op] and ops.kind(op).is_host:
            found[op] = (str(ops.kind(op)) if host.duplex == "full" else "host", place)
    return found
