"""Starting from a plan made before: its schedule competes, its proofs are kept where they hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction

from pipeplan.cluster import Cluster
from pipeplan.ilp.cycle_ratio import minimize_period_for_order
from pipeplan.ilp.incumbent import BoundName, Incumbent
from pipeplan.ilp.offload.byte_options import entry_bytes, offloadable_bytes
from pipeplan.ilp.schedule import OpId, Schedule, StageOffload
from pipeplan.plan import OpKind, Plan


def offer_warm_start(state: Incumbent, plan: Plan) -> None:
    """Offer the schedule of a valid `plan` and take over what is proven for this very problem.

    Where links, speeds or overheads differ, its orders are kept and its times made anew. Halves of
    backwards are joined where the search has none, or where their times would be made anew.

    Args:
        state: not begun.
        plan: of the same chain, on GPUs that are there, whose stages recompute nothing.
    """
    state.set_phase("warm start")
    for name, value in _proven(state, plan):
        state.raise_bound(name, value)
    reason = _offer(state, plan)
    if reason is not None:
        state.notes.append(f"the plan resumed from does not count here: {reason}")


def _offer(state: Incumbent, plan: Plan) -> str | None:
    """Why the schedule cannot compete; None if it does."""
    schedule, ks = schedule_of(plan), state.options.ks
    if len(ks) == 1 and ks[0] % schedule.k:
        return f"its period holds {schedule.k} micro-batches, {ks[0]} are asked for"
    hosts = [stage.gpu for stage in schedule.stages]
    if state.options.contiguous_only and len(hosts) > len(set(hosts)):
        return "a GPU hosts two of its stages, contiguous plans have one"
    if not state.costs.keeps_pins(schedule.stages):
        return "a pinned layer sits on another GPU in it"
    other = _machines(plan.cluster, hosts) != _machines(state.costs.cluster, hosts)
    other |= bool(schedule.offloads) and plan.cluster.host != state.costs.cluster.host
    if plan.splits and (other or not _may_split(state, schedule)):
        schedule, other = _whole_backwards(schedule), True
    if other:
        schedule = minimize_period_for_order(state.costs, schedule, 1)
    if state.offer(schedule):
        return None
    most = state.most_in_flight
    limit = "" if most is None else f" or more than {most} micro-batches in flight"
    return f"it needs more memory{limit} than there is"


def _may_split(state: Incumbent, schedule: Schedule) -> bool:
    """Whether the search has plans with the halves of backwards that this one has."""
    split = [stage for stage in schedule.stages if stage.split_backward]
    return state.options.whole_step and all(
        state.costs.may_split(stage.first, stage.last) for stage in split
    )


def _whole_backwards(schedule: Schedule) -> Schedule:
    """The same orders where each backward is in one piece, when its first half was."""
    stages = tuple(stage.model_copy(update={"split_backward": False}) for stage in schedule.stages)
    times: dict[OpId, tuple[int, ...]] = {
        (OpKind.B if kind is OpKind.I else kind, stage): row
        for (kind, stage), row in schedule.times.items()
        if kind is not OpKind.W
    }
    return replace(schedule, stages=stages, times=times)


def _machines(cluster: Cluster, hosts: list[int]) -> tuple[object, ...]:
    """What the durations and links of stages on these GPUs follow from."""
    speeds = tuple(cluster.gpus[gpu].speed for gpu in hosts)
    return cluster.action_overhead_ns, cluster.links, speeds


def schedule_of(plan: Plan) -> Schedule:
    """The plan's stages, absolute start times (T4), and what is offloaded."""
    times: dict[OpId, dict[int, int]] = {}
    for op in plan.ops:
        row = times.setdefault((op.kind, op.stage), {})
        row[op.copy_] = op.shift * plan.period_ns + op.start_ns
    computed = {
        op: tuple(row[copy] for copy in range(plan.k))
        for op, row in times.items()
        if not op[0].is_host
    }
    stages = tuple(stage.model_copy(update={"remat": None}) for stage in plan.stages)
    return Schedule(stages, plan.period_ns, plan.k, computed, tuple(_offloads(plan, times)))


def _offloads(plan: Plan, times: dict[OpId, dict[int, int]]) -> Iterator[StageOffload]:
    """(H1), (H2) of each stage of the plan that sends something to the host."""
    lengths = {op.stage: op.duration_ns for op in plan.ops if op.kind is OpKind.OFFLOAD}
    for stage in plan.stages:
        if stage.remat is not None and stage.remat.offloads:
            runs, enters = stage.remat.offload, stage.remat.offload_input
            covered = stage.id > 0 and plan.stages[stage.id - 1].gpu == stage.gpu
            entry = entry_bytes(plan.chain, stage.first, covered=covered) if enters else 0
            out, back = times[OpKind.OFFLOAD, stage.id], times[OpKind.PREFETCH, stage.id]
            yield StageOffload(
                stage.id,
                runs,
                entry + sum(offloadable_bytes(plan.chain, run) for run in runs),
                lengths[stage.id],
                {copy: (out[copy], back[copy]) for copy in sorted(out)},
                enters,
            )


def _proven(state: Incumbent, plan: Plan) -> Iterator[tuple[BoundName, Fraction]]:
    """The plan's bounds, if they are about the same machines and kind of plan."""
    costs = state.costs
    same = (plan.semantics, plan.memory_model) == (costs.semantics, costs.memory_model)
    most = plan.solver.most_microbatches
    limited = state.most_in_flight is not None and state.options.microbatches <= (most or 0)
    pinned = set(plan.solver.pins) <= set(costs.pins)
    if not same or not pinned or plan.cluster != costs.cluster or not (most is None or limited):
        return
    if costs.semantics == "flush":
        return  # a step's hold for its number of micro-batches, and for its kind of plan
    if costs.states_away:
        return  # they may follow from states that stay on their GPUs
    bounds = plan.solver.bounds
    named: tuple[tuple[BoundName, tuple[int, int] | None], ...] = (
        ("any", bounds.any),
        ("k1", bounds.k1),
        ("contiguous", bounds.contiguous),
    )
    for name, value in named:
        if value is not None:
            yield name, Fraction(*value)
