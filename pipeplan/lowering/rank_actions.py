"""The order in which a rank executes its actions: docs/reference/model.md §3, (O1)-(O5)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from pipeplan.errors import InvalidPlanError
from pipeplan.plan import Op, OpKind, Plan
from pipeplan.program import ActionKind, Pattern, PeriodicAction

_END, _POST, _INSTANT, _UPDATE, _START = range(5)
"""The classes of (O5). Ends of computes (class 0) are no actions; only FREEs use it here."""


@dataclass(frozen=True, slots=True)
class _Event:
    """One action at its planned time, for the micro-batch `copy` of period 0."""

    rank: int
    kind: ActionKind
    stage: int
    copy: int
    time: int
    cls: int
    position: int
    sub: int = 0


def lower(plan: Plan) -> Pattern:
    """The actions of every rank over one period, in the order (O5).

    Receives are posted no later than their sends are issued (O2, O3), so a send that blocks until
    its receive is posted never closes a circle of waits (O6). Under `2bw` an OPT follows each B.

    Args:
        plan: a verified plan; other plans give an error or a pattern the other voices refuse.

    Returns:
        One list of periodic actions per GPU of the cluster, empty for a GPU without stages.

    Raises:
        InvalidPlanError: if an op of (T1) or (H2) is missing or given twice.

    Source: ours (docs/reference/model.md §3).
    """
    _check_ops(plan)
    busy = _busy(plan)
    period, k = plan.period_ns, plan.k
    ranks: list[list[tuple[tuple[int, ...], PeriodicAction]]] = [[] for _ in plan.cluster.gpus]
    for event in _events(plan, busy):
        shift, offset = divmod(event.time, period)
        key = (offset, event.cls, event.copy - k * shift, event.position, event.sub)
        action = PeriodicAction(event.kind, event.stage, event.copy, shift)
        ranks[event.rank].append((key, action))
    return Pattern(
        k=k,
        semantics=plan.semantics,
        microbatches=plan.microbatches,
        ranks=tuple(
            tuple(action for _, action in sorted(rank, key=lambda pair: pair[0])) for rank in ranks
        ),
        hosted=tuple(
            tuple(stage.id for stage in plan.hosted(gpu)) for gpu in range(len(plan.cluster.gpus))
        ),
    )


def _events(plan: Plan, busy: list[list[tuple[int, int]]]) -> Iterator[_Event]:
    for op in plan.ops:
        if op.kind.is_compute:
            yield from _compute_events(plan, op)
        elif op.kind.is_host:
            yield from _host_events(plan, op, busy)
        else:
            yield from _transfer_events(plan, op, busy)


def _compute_events(plan: Plan, op: Op) -> Iterator[_Event]:
    rank, position = plan.stages[op.stage].gpu, _position(op, len(plan.stages))
    time = _time(plan, op)
    cls = _START if op.duration_ns else _INSTANT
    yield _Event(rank, ActionKind(op.kind), op.stage, op.copy_, time, cls, position)
    if op.kind is OpKind.B and plan.semantics == "2bw":
        end = time + op.duration_ns
        yield _Event(rank, ActionKind.OPT, op.stage, op.copy_, end, _UPDATE, position)


def _transfer_events(plan: Plan, op: Op, busy: list[list[tuple[int, int]]]) -> Iterator[_Event]:
    forward = op.kind is OpKind.SEND_F
    peer = op.stage + 1 if forward else op.stage - 1
    sender, receiver = plan.stages[op.stage].gpu, plan.stages[peer].gpu
    send, receive, free = (
        (ActionKind.SEND_F, ActionKind.RECV_F, ActionKind.FREE_F)
        if forward
        else (ActionKind.SEND_B, ActionKind.RECV_B, ActionKind.FREE_B)
    )
    position, copy, time = _position(op, len(plan.stages)), op.copy_, _time(plan, op)
    issue = _hold(busy[sender], plan.period_ns, time)
    post = _hold(busy[receiver], plan.period_ns, issue)
    cls = _END if op.duration_ns else _INSTANT
    yield _Event(receiver, receive, peer, copy, post, _POST, position)
    yield _Event(sender, send, op.stage, copy, issue, _INSTANT, position)
    yield _Event(sender, free, op.stage, copy, time + op.duration_ns, cls, position, sub=1)


def _host_events(plan: Plan, op: Op, busy: list[list[tuple[int, int]]]) -> Iterator[_Event]:
    """(H5). A PREFETCH is posted like a receive; what waits for its end is the backward."""
    rank, position = plan.stages[op.stage].gpu, _position(op, len(plan.stages))
    time = _time(plan, op)
    begin = _hold(busy[rank], plan.period_ns, time)
    if op.kind is OpKind.PREFETCH:
        yield _Event(rank, ActionKind.PREFETCH, op.stage, op.copy_, begin, _POST, position)
        return
    end = time + op.duration_ns
    yield _Event(rank, ActionKind.OFFLOAD, op.stage, op.copy_, begin, _INSTANT, position)
    yield _Event(rank, ActionKind.FREE_O, op.stage, op.copy_, end, _END, position)


def _time(plan: Plan, op: Op) -> int:
    """(T4) for the micro-batch `copy` of period 0."""
    return op.shift * plan.period_ns + op.start_ns


def _position(op: Op, stages: int) -> int:
    """(T1): where the op stands in a micro-batch's chain order; (H5) for those of the host."""
    if op.kind.is_host:
        return 4 * stages + 2 * op.stage + (op.kind is OpKind.PREFETCH)
    forward = 2 * op.stage if op.kind in (OpKind.F, OpKind.SEND_F) else 0
    backward = 2 * stages - 1 + 2 * (stages - 1 - op.stage)
    base = forward if op.kind in (OpKind.F, OpKind.SEND_F) else backward
    return base + (not op.kind.is_compute)


def _busy(plan: Plan) -> list[list[tuple[int, int]]]:
    """Per GPU the (start in the period, duration) of its compute ops that last."""
    busy: list[list[tuple[int, int]]] = [[] for _ in plan.cluster.gpus]
    for op in plan.ops:
        if op.kind.is_compute and op.duration_ns:
            busy[plan.stages[op.stage].gpu].append((op.start_ns, op.duration_ns))
    return busy


def _hold(busy: list[tuple[int, int]], period: int, time: int) -> int:
    """(O1): `time`, or the start of the compute op that runs across it."""
    for start, duration in busy:
        since = (time - start) % period
        if 0 < since < duration:
            return time - since
    return time


def _check_ops(plan: Plan) -> None:
    wanted = {
        (kind, stage, copy)
        for stage, kind in _ops_of_microbatch([stage.gpu for stage in plan.stages])
        for copy in range(plan.k)
    }
    wanted.update(_host_ops(plan))
    given = [(op.kind, op.stage, op.copy_) for op in plan.ops]
    for kind, stage, copy in sorted(wanted.symmetric_difference(given)):
        has, needs = ("no", "one") if (kind, stage, copy) in wanted else ("one", "none")
        raise InvalidPlanError(
            f"plan: op {stage}{kind}{copy}: got {has}, need {needs}. Verify the plan first."
        )
    if len(given) > len(wanted):
        twice = next(op.label for i, op in enumerate(plan.ops) if given[i] in given[:i])
        raise InvalidPlanError(f"plan: op {twice}: got it twice, need one. Verify the plan first.")


def _ops_of_microbatch(gpus: list[int]) -> Iterator[tuple[int, OpKind]]:
    last = len(gpus) - 1
    for stage, gpu in enumerate(gpus):
        yield stage, OpKind.F
        yield stage, OpKind.B
        if stage < last and gpus[stage + 1] != gpu:
            yield stage, OpKind.SEND_F
            yield stage + 1, OpKind.SEND_B


def _host_ops(plan: Plan) -> Iterator[tuple[OpKind, int, int]]:
    """(H2): where a stage offloads, both ops of each copy that has one, and of one at least."""
    copies: dict[int, set[int]] = defaultdict(set)
    for op in plan.ops:
        if op.kind.is_host:
            copies[op.stage].add(op.copy_)
    for stage, home in enumerate(plan.stages):
        if home.remat and home.remat.offload:
            for copy in copies[stage] or {0}:
                yield OpKind.OFFLOAD, stage, copy
                yield OpKind.PREFETCH, stage, copy
