"""From a solution of the periodic model to a schedule in exact nanoseconds."""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

from ortools.sat.python import cp_model

from pipeplan.ilp.cpsat.variables import Instance, Task, Variables
from pipeplan.ilp.cycle_ratio import minimize_period_for_order
from pipeplan.ilp.schedule import OpId, Schedule, chain_ops, duration, resource
from pipeplan.plan import OpKind, Stage

Times = dict[OpId, tuple[int, ...]]


def schedules(solver: cp_model.CpSolver, v: Variables, lowest: int) -> list[Schedule]:
    """The solution with its items fused where they run back to back, and as it is.

    Times are in ticks; both are brought to exact nanoseconds with the same orders at the shortest
    period, at least `lowest` ns. Where the times are exact already, they follow as they are.
    """
    costs, tick = v.instance.costs, v.instance.tick
    home = [
        next(gpu for gpu in v.instance.gpus if solver.boolean_value(v.on[n][gpu]))
        for n in range(len(v.instance.items))
    ]
    stages = tuple(
        Stage(id=n, layers=layers, gpu=gpu)
        for n, (layers, gpu) in enumerate(zip(v.instance.items, home, strict=True))
    )
    starts = {task: (solver.value(v.time(task)) - v.period) * tick for task in v.position}
    ticks = _ticks(v.instance, home)
    split = Schedule(stages, v.period * tick, v.instance.k, _times(v, stages, ticks, starts))
    made = [split]
    fused = fuse(split, {op for op, length in ticks.items() if not length})
    if fused is not None:
        made.insert(0, fused)
    own = [schedule for schedule in made if _exact(v, schedule)]
    return [
        minimize_period_for_order(costs, each, lowest, _instant(v.instance, each.stages, ticks))
        for each in made
    ] + own


def _ticks(instance: Instance, home: list[int]) -> dict[OpId, int]:
    """The model's length of each op, every item a stage: the true one rounded down."""
    found: dict[OpId, int] = {}
    for item, gpu in enumerate(home):
        begins = item == 0 or home[item - 1] != gpu
        for kind in (OpKind.F, OpKind.B):
            found[kind, item] = instance.ticks(kind, item, gpu, begins=begins)
    for item, (one, two) in enumerate(pairwise(home)):
        found[OpKind.SEND_F, item] = instance.send_ticks(OpKind.SEND_F, item, one, two)
        found[OpKind.SEND_B, item + 1] = instance.send_ticks(OpKind.SEND_B, item + 1, two, one)
    return found


def _instant(
    instance: Instance, stages: tuple[Stage, ...], ticks: dict[OpId, int]
) -> frozenset[OpId]:
    """Ops of stages, each of whole items, that take no time in the model."""
    item_of = {layers[0]: item for item, layers in enumerate(instance.items)}
    ends = {layers[1]: item for item, layers in enumerate(instance.items)}
    found = set[OpId]()
    for op in chain_ops(stages):
        kind, stage = op[0], stages[op[1]]
        first, last = item_of[stage.first], ends[stage.last]
        if kind is OpKind.SEND_F:
            first = last
        elif kind is OpKind.SEND_B:
            last = first
        if not any(ticks[kind, item] for item in range(first, last + 1)):
            found.add(op)
    return frozenset(found)


def _exact(v: Variables, schedule: Schedule) -> bool:
    """Whether the model's times are true ones: early starts may need bytes that late ones do not.

    Not so with ticks, with overhead of joined items, or where the model placed an op of no length
    inside another one.
    """
    costs, stages = v.instance.costs, schedule.stages
    if v.instance.tick > 1 or costs.cluster.action_overhead_ns:
        return False
    placed = [
        (resource(costs, stages, op), start, duration(costs, stages, op))
        for op in chain_ops(stages)
        for start in schedule.times[op]
    ]
    return not any(
        not length and place == other and 0 < (start - begin) % schedule.period < lasts
        for place, start, length in placed
        for other, begin, lasts in placed
    )


def _times(
    v: Variables, stages: tuple[Stage, ...], ticks: dict[OpId, int], starts: dict[Task, int]
) -> Times:
    """Start times by op; a send without variables leaves as soon as its producer ends."""
    times: Times = {}
    for op in chain_ops(stages):
        kind, n = op
        if (kind, n, 0) in starts:
            times[op] = tuple(starts[kind, n, copy] for copy in v.instance.copies)
        else:
            producer = (OpKind.B if kind is OpKind.SEND_B else OpKind.F, n)
            length = ticks[producer] * v.instance.tick
            times[op] = tuple(start + length for start in times[producer])
    return times


def fuse(schedule: Schedule, instant: Collection[OpId]) -> Schedule | None:
    """Join neighbouring stages of one GPU between whose ops nothing else runs; None if none.

    Args:
        schedule: When ops start.
        instant: Its ops that take no time.
    """
    stages, period = schedule.stages, schedule.period
    joined = [
        two.gpu == one.gpu and _adjacent(schedule, instant, one, two)
        for one, two in pairwise(stages)
    ]
    if not any(joined):
        return None
    runs: list[list[Stage]] = [[stages[0]]]
    for stage, join in zip(stages[1:], joined, strict=True):
        if join:
            runs[-1].append(stage)
        else:
            runs.append([stage])
    times: Times = {}
    for index, run in enumerate(runs):
        times[OpKind.F, index] = schedule.times[OpKind.F, run[0].id]
        times[OpKind.B, index] = schedule.times[OpKind.B, run[-1].id]
        for kind, old in ((OpKind.SEND_F, run[-1].id), (OpKind.SEND_B, run[0].id)):
            if (kind, old) in schedule.times:
                times[kind, index] = schedule.times[kind, old]
    fused = tuple(
        Stage(id=index, layers=(run[0].first, run[-1].last), gpu=run[0].gpu)
        for index, run in enumerate(runs)
    )
    return Schedule(fused, period, schedule.k, times)


def _adjacent(schedule: Schedule, instant: Collection[OpId], one: Stage, two: Stage) -> bool:
    """Whether the GPU runs nothing between F of `one` and of `two`, nor between their Bs.

    What begins together with an op of no length runs behind it, unless it has none either.
    """
    ops = {
        op: op not in instant
        for op in schedule.times
        if op[0].is_compute and schedule.stages[op[1]].gpu == one.gpu
    }
    every = [(time % schedule.period, ops[op]) for op in ops for time in schedule.times[op]]
    pairs = [((OpKind.F, one.id), (OpKind.F, two.id)), ((OpKind.B, two.id), (OpKind.B, one.id))]
    for first, second in pairs:
        for start, following in zip(schedule.times[first], schedule.times[second], strict=True):
            distance = following - start
            if distance >= schedule.period:
                return False
            inside = (((time - start) % schedule.period, lasts) for time, lasts in every)
            if any(
                gap < distance and (gap > 0 or (lasts and not ops[first])) for gap, lasts in inside
            ):
                return False
    return True
