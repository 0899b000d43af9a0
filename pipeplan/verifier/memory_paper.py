"""Peak bytes of each GPU as equation (36) of the paper counts them: (P1) to (P5)."""

from __future__ import annotations

from itertools import pairwise

from pipeplan.plan import OpKind, Stage
from pipeplan.verifier import stage_bytes
from pipeplan.verifier.durations import link
from pipeplan.verifier.ledger import GpuLedger, Terms, first_peak, most_at_once
from pipeplan.verifier.moments import Moment, end_of, start_of
from pipeplan.verifier.stage_bytes import StageBytes
from pipeplan.verifier.timetable import Timetable

VERSIONS = 3
"""Copies of the weights in (33): two versions and the gradient."""


def peaks(table: Timetable) -> tuple[Terms, ...]:
    """The terms at the start of the first compute op that reaches each GPU's peak."""
    plan = table.plan
    buffers = _buffers(table)
    sizes = [stage_bytes.paper(plan, stage.id) for stage in plan.stages]
    result = []
    for gpu in range(len(plan.cluster.gpus)):
        weights = sum(
            layer.weight_bytes
            for stage in plan.hosted(gpu)
            for layer in plan.chain.layers[stage.first : stage.last + 1]
        )
        permanent = Terms(states=VERSIONS * weights, message=buffers[gpu])
        result.append(permanent.add(_busiest(table, sizes, gpu)))
    return tuple(result)


def _busiest(table: Timetable, sizes: list[StageBytes], gpu: int) -> Terms:
    """The first peak over the starts of this GPU's computes, permanent terms left out."""
    ledger = GpuLedger(table.period, table.plan.k)
    starts: set[Moment] = set()
    for copy in range(table.plan.k):
        for stage in table.plan.hosted(gpu):
            starts |= _computes(table, ledger, stage, sizes[stage.id], copy)
        for before, after in pairwise(table.order):
            producer, consumer = table[*before, copy], table[*after, copy]
            both = before[0].is_compute and after[0].is_compute and before[1] != after[1]
            if both and table.gpu(producer) == gpu:
                size = _tensor(table, *before)
                ledger.hold(Terms(direct=size), end_of(producer), start_of(consumer))
    return first_peak(terms for moment, terms in ledger.states() if moment in starts)


def _computes(
    table: Timetable, ledger: GpuLedger, stage: Stage, size: StageBytes, copy: int
) -> set[Moment]:
    """(P2) and (P3) of one stage and copy; returns the starts of its ops."""
    forward, backward = table[OpKind.F, stage.id, copy], table[OpKind.B, stage.id, copy]
    ledger.hold(Terms(saved=size.kept), end_of(forward), end_of(backward))
    for op, running in ((forward, size.forward), (backward, size.backward)):
        ledger.hold(Terms(working=running), start_of(op), end_of(op))
    return {ledger.touch(start_of(op)) for op in (forward, backward)}


def _tensor(table: Timetable, kind: OpKind, stage: int) -> int:
    """Bytes of the boundary a compute op's result crosses; gradients are as large as outputs."""
    where = table.plan.stages[stage]
    return table.plan.chain.input_of(where.last + 1 if kind is OpKind.F else where.first)


def _buffers(table: Timetable) -> list[int]:
    """(P5): bytes of all slots at both ends of every transfer, per GPU."""
    plan = table.plan
    total = [0] * len(plan.cluster.gpus)
    for i, (kind, stage) in enumerate(table.order):
        if not kind.is_send:
            continue
        before, after = table.order[i - 1], table.order[i + 1]
        size = _tensor(table, *before)
        sent, received = [], []
        for copy in range(plan.k):
            transfer = table[kind, stage, copy]
            sent.append((table[*before, copy].end, transfer.end))
            received.append((transfer.start, table[*after, copy].start))
        source, target = link(plan, kind, stage)
        total[source] += size * max(1, most_at_once(sent, table.period))
        total[target] += size * max(1, most_at_once(received, table.period))
    return total
