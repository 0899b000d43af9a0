"""The solver's own count of a schedule's bytes: (M1)-(M6), (P1)-(P5), (H6), (H7), exact.

Each byte that comes or goes is a change at a key of (O5). Modulo the period a change at key
(time, class, micro-batch, position) of quotient q = time div period acts q periods later, so the
level before the first event of a period is -sum(q * change); sorting the keys gives the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pipeplan.ilp.costs import Costs
from pipeplan.ilp.memory_events import (
    DIRECT,
    MESSAGE,
    SAVED,
    WORKING,
    Change,
    ExactSweep,
    PaperSweep,
    Sweep,
)
from pipeplan.ilp.schedule import OpId, Schedule
from pipeplan.plan import MemoryRow, OpKind


def memory_rows(costs: Costs, schedule: Schedule) -> tuple[MemoryRow, ...]:
    """One row per GPU, at the first instant of its largest total.

    Args:
        costs: Durations and bytes of the chain on the cluster.
        schedule: A schedule that keeps (R2)-(R5).
    """
    sweep = ExactSweep(costs, schedule) if costs.exact else PaperSweep(costs, schedule)
    changes: list[list[Change]] = [[] for _ in range(costs.gpus)]
    for change in sweep.changes():
        changes[change.gpu].append(change)
    rows = tuple(_row(costs, schedule, gpu, changes[gpu], sweep) for gpu in range(costs.gpus))
    if not schedule.away:
        return rows
    away = host_bytes(costs, schedule)
    return tuple(row.model_copy(update={"host_bytes": away[row.gpu]}) for row in rows)


def fits(rows: Iterable[MemoryRow]) -> bool:
    """Whether no GPU's peak exceeds its memory."""
    return all(row.peak_bytes <= row.budget_bytes for row in rows)


def host_bytes(costs: Costs, schedule: Schedule) -> list[int]:
    """(H7) of each GPU: the most of it that waits in the host's memory at once."""
    sweep = ExactSweep(costs, schedule)
    changes: list[list[Change]] = [[] for _ in range(costs.gpus)]
    for away in schedule.away:
        changes[schedule.stages[away.stage].gpu] += sweep.waiting(away)
    return [peak_terms(schedule, own)[SAVED] for own in changes]


def in_flight(costs: Costs, schedule: Schedule) -> tuple[int, ...]:
    """Largest number of micro-batches at once between start of F and end of B, by stage (§2)."""
    return _at_once(schedule, Sweep(costs, schedule), Sweep.end)


def not_updated(costs: Costs, schedule: Schedule) -> tuple[int, ...]:
    """As `in_flight`, but each counts until the update that may follow its B: (R6)."""
    return _at_once(schedule, Sweep(costs, schedule), Sweep.update)


def _at_once(
    schedule: Schedule, sweep: Sweep, leaves: Callable[[Sweep, OpId, int, int, int], Change]
) -> tuple[int, ...]:
    """By stage, the most micro-batches whose F has begun and that have not left after their B."""
    counts = []
    for stage in schedule.stages:
        changes = [
            change
            for copy in range(schedule.k)
            for change in (
                sweep.start((OpKind.F, stage.id), copy, SAVED, 1),
                leaves(sweep, (OpKind.B, stage.id), copy, SAVED, -1),
            )
        ]
        counts.append(peak_terms(schedule, changes)[SAVED])
    return tuple(counts)


def _row(
    costs: Costs, schedule: Schedule, gpu: int, changes: list[Change], sweep: Sweep
) -> MemoryRow:
    hosted = [stage.id for stage in schedule.stages if stage.gpu == gpu]
    sizes = [sweep.segment(stage) for stage in hosted]
    states = sum(size.states for size in sizes)
    terms = peak_terms(schedule, changes) if hosted else [0, 0, 0, 0]
    terms[MESSAGE] += sweep.permanent(gpu)
    if costs.exact and costs.semantics == "flush" and hosted:
        update = max(size.optimizer for size in sizes)
        if update > sum(terms):
            terms = [0, update, 0, 0]
    return MemoryRow(
        gpu=gpu,
        states_bytes=states,
        saved_bytes=terms[SAVED],
        working_bytes=terms[WORKING],
        direct_bytes=terms[DIRECT],
        message_bytes=terms[MESSAGE],
        peak_bytes=states + sum(terms),
        budget_bytes=costs.budgets[gpu],
    )


def peak_terms(schedule: Schedule, changes: Sequence[Change]) -> list[int]:
    """The four terms after the first counted event that reaches the largest sum."""
    period, k = schedule.period, schedule.k
    level = [0, 0, 0, 0]
    keyed: dict[tuple[int, int, int, int, int], list[Change]] = {}
    for change in changes:
        quotient, offset = divmod(change.time, period)
        level[change.term] -= quotient * change.size
        key = (offset, change.order, change.microbatch - quotient * k, change.position, change.sub)
        keyed.setdefault(key, []).append(change)
    best, total = [0, 0, 0, 0], -1
    for key in sorted(keyed):
        for change in keyed[key]:
            level[change.term] += change.size
        if any(change.counted for change in keyed[key]) and sum(level) > total:
            best, total = level.copy(), sum(level)
    return best
