"""The solver's own count of a schedule's bytes: (M1)-(M6), (P1)-(P5), (H6), (H7), exact.

Each byte that comes or goes is a change at a key of (O5). Modulo the period a change at key
(time, class, micro-batch, position) of quotient q = time div period acts q periods later, so the
level before the first event of a period is -sum(q * change); sorting the keys gives the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pipeplan.ilp.costs import CostModel
from pipeplan.ilp.memory_events import (
    DIRECT,
    MESSAGE,
    SAVED,
    WORKING,
    ExactMemoryEvents,
    MemoryEvent,
    MemoryEvents,
    PaperMemoryEvents,
)
from pipeplan.ilp.schedule import OpId, Schedule
from pipeplan.plan import MemoryRow, OpKind


def memory_rows(
    costs: CostModel, schedule: Schedule, *, claims: bool = False
) -> tuple[MemoryRow, ...]:
    """One row per GPU, at the first instant of its largest total.

    Args:
        costs: Durations and bytes of the chain on the cluster.
        schedule: A schedule that keeps (R2)-(R5).
        claims: Whether the terms are asked for, not only the peaks: where several instants reach
            a peak, the first may be one at which no bytes change.
    """
    sweep = (
        ExactMemoryEvents(costs, schedule) if costs.exact else PaperMemoryEvents(costs, schedule)
    )
    changes: list[list[MemoryEvent]] = [[] for _ in range(costs.gpus)]
    for change in (*sweep.events(), *(sweep.issues() if claims else ())):
        changes[change.gpu].append(change)
    rows = tuple(_row(costs, schedule, gpu, changes[gpu], sweep) for gpu in range(costs.gpus))
    if not schedule.uses_host:
        return rows
    hosted = host_bytes(costs, schedule)
    return tuple(row.model_copy(update={"host_bytes": hosted[row.gpu]}) for row in rows)


def fits(rows: Iterable[MemoryRow]) -> bool:
    """Whether no GPU's peak exceeds its memory."""
    return all(row.peak_bytes <= row.budget_bytes for row in rows)


def host_bytes(costs: CostModel, schedule: Schedule) -> list[int]:
    """(U4) of each GPU: the most of it that resides on the host at once, states included."""
    sweep = ExactMemoryEvents(costs, schedule)
    changes: list[list[MemoryEvent]] = [[] for _ in range(costs.gpus)]
    for offload in schedule.offloads:
        changes[schedule.stages[offload.stage].gpu] += sweep.host_events(offload)
    sizes = [peak_terms(schedule, own)[SAVED] for own in changes]
    for stage in schedule.stages:
        if stage.states == "host":
            sizes[stage.gpu] += costs.states_on_host(stage.first, stage.last)
    return sizes


def in_flight(costs: CostModel, schedule: Schedule) -> tuple[int, ...]:
    """Largest number of micro-batches at once between start of F and end of B, by stage (§2)."""
    return _at_once(schedule, MemoryEvents(costs, schedule), MemoryEvents.end)


def in_flight_until_update(costs: CostModel, schedule: Schedule) -> tuple[int, ...]:
    """As `in_flight`, but each counts until the update that may follow its B: (R6)."""
    return _at_once(schedule, MemoryEvents(costs, schedule), MemoryEvents.update)


def _at_once(
    schedule: Schedule,
    sweep: MemoryEvents,
    leaves: Callable[[MemoryEvents, OpId, int, int, int], MemoryEvent],
) -> tuple[int, ...]:
    """By stage, the most micro-batches whose F has begun and that have not left after their B."""
    counts = []
    for stage in schedule.stages:
        changes = [
            change
            for copy in range(schedule.k)
            for change in (
                sweep.start((OpKind.F, stage.id), copy, SAVED, 1),
                leaves(sweep, (stage.backward, stage.id), copy, SAVED, -1),
            )
        ]
        counts.append(peak_terms(schedule, changes)[SAVED])
    return tuple(counts)


def _row(
    costs: CostModel, schedule: Schedule, gpu: int, changes: list[MemoryEvent], sweep: MemoryEvents
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


def peak_terms(schedule: Schedule, changes: Sequence[MemoryEvent]) -> list[int]:
    """The four terms after the first counted event that reaches the largest sum."""
    period, k = schedule.period, schedule.k
    level = [0, 0, 0, 0]
    keyed: dict[tuple[int, int, int, int, int], list[MemoryEvent]] = {}
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
