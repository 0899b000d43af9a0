"""Peak bytes of each GPU in the exact model: (M1) to (M7), (H6), (S3) to (S5)."""

from __future__ import annotations

from itertools import pairwise

from pipeplan.plan import OpKind, Plan, Stage
from pipeplan.verifier import host_states, offload, stage_bytes
from pipeplan.verifier.durations import link, message_bytes
from pipeplan.verifier.ledger import GpuLedger, Terms, first_peak
from pipeplan.verifier.moments import Hold, end_of, free_of, start_of, update_of
from pipeplan.verifier.split import halves
from pipeplan.verifier.stage_bytes import StageBytes
from pipeplan.verifier.timetable import TimedOp, Timetable


def peaks(table: Timetable) -> tuple[Terms, ...]:
    """(M6): the terms after the first event that reaches each GPU's peak."""
    plan = table.plan
    ledgers = [GpuLedger(table.period, plan.k) for _ in plan.cluster.gpus]
    hold = Hold(table)
    sizes = [stage_bytes.exact(plan, stage.id) for stage in plan.stages]
    for copy in range(plan.k):
        for stage, size in zip(plan.stages, sizes, strict=True):
            _computes(table, ledgers[stage.gpu], stage, size, copy)
            if stage.split_backward:
                _weights(table, ledgers[stage.gpu], stage, copy)
        for before, after in pairwise(table.order):
            if after[0].is_compute and before[0].is_compute and before[1] != after[1]:
                _direct(table, ledgers, table[*before, copy], table[*after, copy])
        for i, (kind, stage_index) in enumerate(table.order):
            if kind.is_send:
                producer, consumer = (table[*table.order[j], copy] for j in (i - 1, i + 1))
                transfer = table[kind, stage_index, copy]
                _message(table, ledgers, hold, producer, transfer, consumer)
    offload.release(table, ledgers, hold)
    return tuple(_peak(plan, gpu, ledger) for gpu, ledger in enumerate(ledgers))


def _computes(
    table: Timetable, ledger: GpuLedger, stage: Stage, size: StageBytes, copy: int
) -> None:
    """(M2), (M3) and the optimizer instant of one stage and copy."""
    forward, backward = table[OpKind.F, stage.id, copy], table.backward(stage.id, copy)
    ledger.hold(Terms(saved=size.kept), start_of(forward), end_of(backward))
    back = halves(table.plan, stage.id).running if stage.split_backward else size.backward
    for op, running in ((forward, size.forward), (backward, back)):
        ledger.hold(Terms(working=running - size.kept), start_of(op), end_of(op))
    if table.plan.semantics == "2bw" and not stage_bytes.all_late(table.plan, stage):
        update = update_of(backward)
        workspace = Terms(working=_workspace(table.plan, stage))
        ledger.hold(workspace, update, update._replace(step=1))


def _weights(table: Timetable, ledger: GpuLedger, stage: Stage, copy: int) -> None:
    """(S3) and (S5) of one stage and copy, from the end of I on."""
    size = halves(table.plan, stage.id)
    begin, weights = end_of(table.backward(stage.id, copy)), table[OpKind.W, stage.id, copy]
    end = end_of(weights)
    ledger.hold(Terms(saved=size.kept), begin, end)
    ledger.hold(Terms(working=size.weights - size.kept), start_of(weights), end)
    if size.shared:
        counted = min(end, start_of(table.backward(stage.id - 1, copy)))
        ledger.hold(Terms(saved=-size.shared), begin, counted)


def _direct(
    table: Timetable, ledgers: list[GpuLedger], producer: TimedOp, consumer: TimedOp
) -> None:
    """(M4): between two stages on one GPU, from the producer's end to the consumer's start."""
    terms = Terms(direct=_unsaved(table.plan, producer))
    ledgers[table.gpu(producer)].hold(terms, end_of(producer), start_of(consumer))


def _message(
    table: Timetable,
    ledgers: list[GpuLedger],
    hold: Hold,
    producer: TimedOp,
    transfer: TimedOp,
    consumer: TimedOp,
) -> None:
    """(M5): on the sender from the producer's end to FREE, on the receiver from RECV on."""
    source, target = link(table.plan, transfer.kind, transfer.stage)
    sent = Terms(message=_unsaved(table.plan, producer))
    received = Terms(message=message_bytes(table.plan, transfer.kind, transfer.stage))
    ledgers[source].hold(sent, end_of(producer), free_of(transfer))
    ledgers[source].touch(hold.issue(transfer))
    ledgers[target].hold(received, hold.post(transfer), start_of(consumer))


def _unsaved(plan: Plan, producer: TimedOp) -> int:
    """Bytes of a result that its own stage does not keep anyway: y - so - po, or gx."""
    stage = plan.stages[producer.stage]
    if producer.kind is not OpKind.F:
        return plan.chain.gradient_of_input(stage.first)
    layer = plan.chain.layers[stage.last]
    passing = layer.saved_passing_bytes if plan.cluster.host is None else 0
    return layer.output_bytes - layer.saved_output_bytes - passing


def _workspace(plan: Plan, stage: Stage) -> int:
    """W(s): the largest optimizer workspace of a layer; none where the host updates, (U2)."""
    if stage.states == "host":
        return 0
    layers = plan.chain.layers[stage.first : stage.last + 1]
    return max(layer.optimizer_workspace_bytes for layer in layers)


def _peak(plan: Plan, gpu: int, ledger: GpuLedger) -> Terms:
    """(M1) plus the largest state of the period, or flush's update after the drain."""
    hosted = plan.hosted(gpu)
    versions = 2 if plan.semantics == "2bw" else 1
    layers = [layer for s in hosted for layer in plan.chain.layers[s.first : s.last + 1]]
    states = Terms(
        states=sum(
            versions * layer.weight_bytes
            + layer.gradient_bytes
            + (versions - 1) * layer.waiting_gradient_bytes
            + layer.optimizer_bytes
            for layer in layers
        )
        - sum(host_states.moved(plan, stage) for stage in hosted)
    )
    found = [terms for _, terms in ledger.states()]
    if plan.semantics == "flush" and hosted:
        found.append(Terms(working=max(_workspace(plan, stage) for stage in hosted)))
    return states.add(first_peak(found))
