"""Puts together what a finished run reports."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from math import ceil

from pipeplan.memory_terms import GpuTerms
from pipeplan.plan import OpKind, Plan
from pipeplan.program import Program
from pipeplan.simulator import measure
from pipeplan.simulator.charges import Charges
from pipeplan.simulator.engine import Engine, Times
from pipeplan.simulator.host_states import host_terms
from pipeplan.simulator.ledger import RankLedger
from pipeplan.simulator.links import PlannedLinks
from pipeplan.simulator.permanent import permanent
from pipeplan.simulator.result import Clock, Discrepancy, Simulation
from pipeplan.simulator.riding import Once
from pipeplan.simulator.tape import Does, Ops, number
from pipeplan.simulator.terms import TermLedger, Things, gpu_memory
from pipeplan.simulator.window import Window
from pipeplan.units import ceil_div


def report(
    plan: Plan,
    clock: Clock,
    program: Program,
    engine: Engine,
    window: Window,
    updates: bool,
    once: Callable[[], Mapping[int, Once]],
) -> Simulation:
    """Everything a finished run tells, the ledger of every rank included.

    `once` gives the bytes of stages whose terms count a storage once that several layers keep.
    """
    times, ranks = engine.times, range(len(engine.tapes))
    charges = Charges.of(plan, times.ops)
    # With updates the tape holds only the real ones: which weights a forward uses is not in doubt.
    steps = plan.microbatches if plan.semantics == "2bw" and clock == "plan" else None
    ledgers = [RankLedger(charges, times, rank, engine.tapes[rank], steps) for rank in ranks]
    peaks = [measure.Peaks() for _ in ranks]
    for each, ledger, tape in zip(peaks, ledgers, engine.tapes, strict=True):
        each.watch(ledger.levels(), tape, window, flush=plan.semantics == "flush")
    buffers = measure.buffers_bytes(plan, times)
    rows = tuple(measure.row(plan, g, peaks[g], buffers[g]) for g in ranks)
    always = [row.states_bytes + extra for row, extra in zip(rows, buffers, strict=True)]
    begin, end = _span(engine)

    def terms(gpu: int) -> GpuTerms:
        tape, alone = engine.tapes[gpu], once()
        things = Things.of(plan, times.ops, alone)
        return gpu_memory(
            RankLedger(charges, times, gpu, tape, steps).levels(),
            TermLedger(things, charges, times.ops, tape),
            permanent(plan, gpu, times),
            host_terms(plan, gpu),
            program.ranks[gpu],
            window.frame,
            once=bool(alone),
        )

    flights = {stage: n for ledger in ledgers for stage, n in ledger.in_flight.items()}
    return Simulation(
        clock=clock,
        microbatches=len(times.start[0]),
        period_ns=window.period_ns,
        makespan_ns=end - begin,
        step_ns=_step_ns(plan, clock, times, window, end - begin, updates),
        in_flight=tuple(flights.get(stage, 0) for stage in range(len(plan.stages))),
        memory=rows,
        peaks=tuple(peaks[g].event(program.ranks[g]) for g in ranks),
        fill_peak_bytes=tuple(always[g] + peaks[g].fill for g in ranks),
        steady_peak_bytes=tuple(always[g] + peaks[g].steady for g in ranks),
        drain_peak_bytes=tuple(always[g] + peaks[g].drain for g in ranks),
        bubble=measure.idle_shares(plan, times, window.measured or (begin, end)),
        left_bytes=tuple(peaks[g].left for g in ranks),
        discrepancies=(*_order(times), *_weights(plan, ledgers)),
        times=times,
        levels=lambda g: (
            (level.time, always[g] + level.total)
            for level in RankLedger(charges, times, g, engine.tapes[g], steps).levels()
        ),
        terms=terms,
    )


def late(program: Program, engine: Engine, links: PlannedLinks) -> Iterator[Discrepancy]:
    """What could not happen when the plan says."""
    yield from _returns(program, engine)
    for entry in engine.late:
        yield Discrepancy(
            "order",
            f"GPU {entry.rank}, {program.ranks[entry.rank][entry.index]}",
            f"is due at {entry.due} ns, can start at {entry.ready} ns, when {entry.reason}",
        )
    for transfer in links.late:
        yield Discrepancy(
            "link",
            f"transfer {Ops.label(transfer.op, transfer.microbatch)}",
            f"is due at {transfer.due} ns, can start at {transfer.ready} ns,"
            f" when {transfer.reason}",
        )


def _returns(program: Program, engine: Engine) -> Iterator[Discrepancy]:
    """(H3): a place for what comes back is taken only when it has left."""
    times = engine.times
    for rank, tape in enumerate(engine.tapes):
        for index, (does, op, microbatch) in enumerate(tape):
            if does != Does.PREFETCH:
                continue
            left, posted = times.end[times.ops.before[op]][microbatch], times.when[rank][index]
            if left is not None and posted < left:
                yield Discrepancy(
                    "order",
                    f"GPU {rank}, {program.ranks[rank][index]}",
                    f"happens at {posted} ns, before its OFFLOAD ends at {left} ns",
                )


def _span(engine: Engine) -> tuple[int, int]:
    """First start and last end of anything that lasts, updates included."""
    times = engine.times
    starts = [time for each in times.start for time in each if time is not None]
    ends = [time for each in times.end for time in each if time is not None]
    return (min(starts), max(*ends, *engine.now, *engine.host)) if starts else (0, 0)


def _step_ns(
    plan: Plan, clock: Clock, times: Times, window: Window, makespan: int, updates: bool
) -> int | None:
    """How long one optimizer step takes: (T5) from planned starts, else as it was replayed."""
    count, period = len(times.start[0]), window.period_ns
    if clock == "eager":
        if not updates or not count:
            return None
        if plan.semantics == "flush":
            return ceil_div(makespan, ceil_div(count, plan.microbatches))
        return None if period is None else ceil(plan.microbatches * period / plan.k)
    if period is None:
        return None
    update = _updates_ns(plan, times, period)
    if plan.semantics == "2bw":
        return ceil(plan.microbatches * period / plan.k) + update
    used = min(count, plan.microbatches)
    begin = min(time for each in times.start for time in each[:used] if time is not None)
    # The last micro-batch ends last; if it was not replayed, an equal one was, periods earlier.
    last = plan.microbatches - 1
    replayed = last if last < count else count - 1 - (count - 1 - last) % plan.k
    ends = [each[replayed] for each in times.end]
    end = max(time for time in ends if time is not None)
    return int(end + Fraction(last - replayed, plan.k) * period) - begin + update


def _updates_ns(plan: Plan, times: Times, period: Fraction) -> int:
    """Of the slowest GPU: what holds it, and what of the rest a forward would have to wait for."""
    ops, k = times.ops, plan.k

    def at(op: int, microbatch: int, ended: bool = False) -> int:
        known = (times.end if ended else times.start)[op][microbatch % k]
        assert known is not None
        return known + int(microbatch // k * period)

    found = []
    for gpu in range(len(plan.cluster.gpus)):
        hosted = [stage.id for stage in plan.hosted(gpu)]
        beside = [stage for stage in hosted if ops.behind[stage]]
        left = [
            min(
                at(number(OpKind.F, stage), last + plan.microbatches + 1),
                at(ops.backward(stage), last + plan.microbatches, ended=True),
            )
            - at(ops.backward(stage), last, ended=True)
            for stage in beside
            for last in range(k)
        ]
        late = max(0, sum(ops.behind[stage] for stage in beside) - min(left)) if left else 0
        found.append(sum(ops.update[stage] for stage in hosted) + late)
    return max(found)


def _order(times: Times) -> Iterator[Discrepancy]:
    """Every op must take micro-batches in index order, those that have it."""
    for op, starts in enumerate(times.start):
        last: tuple[int, int] | None = None
        for microbatch, (start, end) in enumerate(zip(starts, times.end[op], strict=True)):
            if start is None or end is None:
                continue
            if last is not None and last[1] > start:
                yield Discrepancy(
                    "fifo",
                    f"op {Ops.label(op, microbatch)}",
                    f"starts at {start} ns, before {Ops.label(op, last[0])} ends at {last[1]} ns",
                )
            last = microbatch, end


def _weights(plan: Plan, ledgers: list[RankLedger]) -> Iterator[Discrepancy]:
    """Under 2bw the weights that a forward uses must exist when it starts."""
    for ledger in ledgers:
        if ledger.unversioned is not None:
            stage, microbatch = ledger.unversioned
            yield Discrepancy(
                "versions",
                f"op {stage}F{microbatch}",
                f"starts before the update of micro-batch {microbatch - plan.microbatches - 1}"
                " can: two weight versions are not enough",
            )
