"""What follows from the schedule as a whole: in-flight counts, (R6) and (T5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipeplan.plan import OpKind
from pipeplan.units import ceil_div
from pipeplan.verifier import host_states
from pipeplan.verifier.durations import scaled
from pipeplan.verifier.ledger import GpuLedger, Terms
from pipeplan.verifier.moments import Moment, end_of, start_of, update_of
from pipeplan.verifier.timetable import TimedOp, Timetable
from pipeplan.verifier.violation import Rule, Violation


def in_flight(table: Timetable, leaves: Callable[[TimedOp], Moment] = end_of) -> tuple[int, ...]:
    """Per stage, the most micro-batches at once between start of F and end of B (or I), by (O5).

    `leaves` tells from B when a micro-batch counts no longer.
    """
    counts = []
    for stage in table.plan.stages:
        ledger = GpuLedger(table.period, table.plan.k)
        for copy in range(table.plan.k):
            forward, backward = table[OpKind.F, stage.id, copy], table.backward(stage.id, copy)
            ledger.hold(Terms(saved=1), start_of(forward), leaves(backward))
        counts.append(max(terms.saved for _, terms in ledger.states()))
    return tuple(counts)


def optimizer_ns(table: Timetable) -> int:
    """(T5), last term: the slowest GPU's update of all layers it hosts; (U5), (U7) on the host."""
    plan = table.plan
    held = [0] * len(plan.cluster.gpus)
    behind, room = list(held), [plan.microbatches * table.period] * len(held)
    for stage in plan.stages:
        gpu = stage.gpu
        if stage.states == "gpu":
            layers = plan.chain.layers[stage.first : stage.last + 1]
            held[gpu] += sum(
                scaled(layer.optimizer_ns, plan.cluster.gpus[gpu].speed) for layer in layers
            )
            continue
        held[gpu] += host_states.gradients_ns(plan, stage)
        rest = host_states.behind_ns(plan, stage)
        if rest and host_states.runs_beside(plan, stage):
            behind[gpu] += rest
            room[gpu] = min(room[gpu], _room_ns(table, stage.id))
        else:
            held[gpu] += rest
    late = (max(0, rest - left) for rest, left in zip(behind, room, strict=True))
    return max(total + more for total, more in zip(held, late, strict=True))


def _room_ns(table: Timetable, stage: int) -> int:
    """(U7), v(s): from an update to the first forward that reads it, or to the next update."""
    k, count = table.plan.k, table.plan.microbatches

    def moved(op: TimedOp, microbatch: int) -> int:
        return (microbatch - op.copy) // k * table.period

    rooms = []
    for copy in range(k):
        reader, last = copy + count + 1, copy + count
        forward = table[OpKind.F, stage, reader % k]
        backward = table[OpKind.B, stage, last % k]
        ends = forward.start + moved(forward, reader), backward.end + moved(backward, last)
        rooms.append(min(ends) - table[OpKind.B, stage, copy].end)
    return min(rooms)


def step_ns(table: Timetable) -> int:
    """(T5): the plan-clock time of one optimizer step of `microbatches` micro-batches."""
    plan = table.plan
    update = optimizer_ns(table)
    if plan.semantics == "2bw":
        return ceil_div(plan.microbatches * table.period, plan.k) + update
    used = [op for op in table.all if op.copy < plan.microbatches]
    latest = max(
        op.end + (plan.microbatches - 1 - op.copy) // plan.k * table.period for op in used
    )
    return latest - min(op.start for op in used) + update


def least_microbatches(table: Timetable) -> tuple[int, ...]:
    """(R6): per stage, the micro-batches of a step with which two weight versions suffice.

    A micro-batch counts until its update: at one instant, forwards without length come before it.
    """
    if table.plan.semantics != "2bw":
        return (1,) * len(table.plan.stages)
    return tuple(max(1, count - 1) for count in in_flight(table, update_of))


def weight_versions(table: Timetable) -> Iterator[Violation]:
    """Every stage gets by with two weight versions, (R6)."""
    got = table.plan.microbatches
    for stage, least in enumerate(least_microbatches(table)):
        if got < least:
            yield Violation(
                Rule.VERSIONS,
                f"stage {stage}",
                f"got {got} micro-batches per step, need {least}: {least + 1} are in flight",
            )


def step(table: Timetable) -> Iterator[Violation]:
    """`step_ns` is (T5)."""
    got, need = table.plan.step_ns, step_ns(table)
    if got != need:
        yield Violation(Rule.STEP, "step_ns", f"got {got} ns, need {need} ns")
