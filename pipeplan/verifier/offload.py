"""Bytes in the host's memory instead of on a GPU: (H5) to (H7), (U4), and rule `host`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import add

from pipeplan.plan import OpKind, Plan
from pipeplan.verifier.host_states import stage_on_host
from pipeplan.verifier.ledger import GpuLedger, Terms, first_peak
from pipeplan.verifier.moments import Hold, free_of, start_of
from pipeplan.verifier.stage_bytes import offloaded
from pipeplan.verifier.timetable import Timetable
from pipeplan.verifier.violation import Rule, Violation


def release(table: Timetable, ledgers: Sequence[GpuLedger], hold: Hold) -> None:
    """(H6): takes what is away out of each GPU's saved bytes."""
    for stage, copies in table.offloaded.items():
        ledger = ledgers[table.plan.stages[stage].gpu]
        away = Terms(saved=-offloaded(table.plan, table.plan.stages[stage]))
        for copy in copies:
            there, back = (table[kind, stage, copy] for kind in (OpKind.OFFLOAD, OpKind.PREFETCH))
            ledger.touch(hold.issue(there))
            # Until its forward ends that uses what leaves, even if it has been copied: (H5).
            used, copied = table[OpKind.F, stage, copy].end, free_of(there)
            left = copied._replace(time=max(copied.time, used))
            ledger.hold(away, left, hold.post(back))


def host_bytes(table: Timetable) -> tuple[int, ...]:
    """(U4): per GPU, the most that it has in the host's memory at once, states included."""
    plan = table.plan
    fixed = [0] * len(plan.cluster.gpus)
    for each in plan.stages:
        fixed[each.gpu] += stage_on_host(plan, each)
    return tuple(map(add, fixed, _waiting(table)))


def _waiting(table: Timetable) -> Iterator[int]:
    """(H7) of each GPU."""
    ledgers = [GpuLedger(table.period, table.plan.k) for _ in table.plan.cluster.gpus]
    hold = Hold(table)
    for stage, copies in table.offloaded.items():
        size = Terms(saved=offloaded(table.plan, table.plan.stages[stage]))
        for copy in copies:
            there, backward = table[OpKind.OFFLOAD, stage, copy], table.backward(stage, copy)
            ledger = ledgers[table.gpu(backward)]
            ledger.hold(size, hold.issue(there), start_of(backward))
    return (first_peak(terms for _, terms in each.states()).saved for each in ledgers)


def host(plan: Plan, sizes: Sequence[int]) -> Iterator[Violation]:
    """What all GPUs have in the host's memory, each at its most, fits into it."""
    total, where = sum(sizes), plan.cluster.host
    if where is not None and total > where.memory_bytes:
        shares = ", ".join(f"GPU {gpu} {size}" for gpu, size in enumerate(sizes) if size)
        over = total - where.memory_bytes
        need = f"need at most {where.memory_bytes}: {over} over ({shares})"
        yield Violation(Rule.HOST, "host", f"got {total} bytes, {need}")
