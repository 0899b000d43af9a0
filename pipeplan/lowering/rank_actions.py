"""The order in which a rank executes its actions: docs/reference/model.md §3, (O1)-(O5)."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from pipeplan.errors import InvalidPlanError
from pipeplan.plan import Op, OpKind, Plan, Stage
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
        InvalidPlanError: if an op of (T1), (H2) or (S1) is missing or given twice.

    Source: ours (docs/reference/model.md §3).
    """
    _check_ops(plan)
    busy = _Busy.of(plan)
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


def _events(plan: Plan, busy: _Busy) -> Iterator[_Event]:
    forwards = {(op.stage, op.copy_): op for op in plan.ops if op.kind is OpKind.F}
    for op in plan.ops:
        if op.kind.is_compute:
            yield from _compute_events(plan, op)
        elif op.kind.is_host:
            yield from _host_events(plan, op, forwards[op.stage, op.copy_], busy)
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


def _transfer_events(plan: Plan, op: Op, busy: _Busy) -> Iterator[_Event]:
    forward = op.kind is OpKind.SEND_F
    peer = op.stage + 1 if forward else op.stage - 1
    sender, receiver = plan.stages[op.stage].gpu, plan.stages[peer].gpu
    send, receive, free = (
        (ActionKind.SEND_F, ActionKind.RECV_F, ActionKind.FREE_F)
        if forward
        else (ActionKind.SEND_B, ActionKind.RECV_B, ActionKind.FREE_B)
    )
    position, copy, time = _position(op, len(plan.stages)), op.copy_, _time(plan, op)
    issue = busy.hold(sender, time)
    post = busy.hold(receiver, issue)
    cls = _END if op.duration_ns else _INSTANT
    yield _Event(receiver, receive, peer, copy, post, _POST, position)
    yield _Event(sender, send, op.stage, copy, issue, _INSTANT, position)
    yield _Event(sender, free, op.stage, copy, time + op.duration_ns, cls, position, sub=1)


def _host_events(plan: Plan, op: Op, forward: Op, busy: _Busy) -> Iterator[_Event]:
    """(H5). A PREFETCH is posted like a receive; what waits for its end is the backward."""
    rank, position = plan.stages[op.stage].gpu, _position(op, len(plan.stages))
    time = _time(plan, op)
    begin = busy.hold(rank, time)
    if op.kind is OpKind.PREFETCH:
        yield _Event(rank, ActionKind.PREFETCH, op.stage, op.copy_, begin, _POST, position)
        return
    end = max(time + op.duration_ns, _time(plan, forward) + forward.duration_ns)
    yield _Event(rank, ActionKind.OFFLOAD, op.stage, op.copy_, begin, _INSTANT, position)
    yield _Event(rank, ActionKind.FREE_O, op.stage, op.copy_, end, _END, position)


def _time(plan: Plan, op: Op) -> int:
    """(T4) for the micro-batch `copy` of period 0."""
    return op.shift * plan.period_ns + op.start_ns


def _position(op: Op, stages: int) -> int:
    """(T1): the op's place in a micro-batch's chain order; (H5), (S1) for what is beside it."""
    if op.kind is OpKind.W:
        return 6 * stages + op.stage
    if op.kind.is_host:
        return 4 * stages + 2 * op.stage + (op.kind is OpKind.PREFETCH)
    forward = 2 * op.stage if op.kind in (OpKind.F, OpKind.SEND_F) else 0
    backward = 2 * stages - 1 + 2 * (stages - 1 - op.stage)
    base = forward if op.kind in (OpKind.F, OpKind.SEND_F) else backward
    return base + (not op.kind.is_compute)


@dataclass(frozen=True, slots=True)
class _Busy:
    """When the GPUs compute: per GPU the (start in the period, duration) of ops that last."""

    period: int
    intervals: list[list[tuple[int, int]]]
    """In the order of their starts."""

    @classmethod
    def of(cls, plan: Plan) -> _Busy:
        """The compute ops of `plan`."""
        intervals: list[list[tuple[int, int]]] = [[] for _ in plan.cluster.gpus]
        for op in plan.ops:
            if op.kind.is_compute and op.duration_ns:
                start = op.start_ns % plan.period_ns
                intervals[plan.stages[op.stage].gpu].append((start, op.duration_ns))
        return cls(plan.period_ns, [sorted(each) for each in intervals])

    def hold(self, gpu: int, time: int) -> int:
        """(O1): `time`, or the start of the compute op on `gpu` that runs across it.

        No two of them overlap, so it is the last one that starts before, around the period.
        """
        known = self.intervals[gpu]
        if not known:
            return time
        start, duration = known[bisect_left(known, (time % self.period, 0)) - 1]
        since = (time - start) % self.period
        return time - since if 0 < since < duration else time


def _check_ops(plan: Plan) -> None:
    wanted = {
        (kind, stage, copy) for stage, kind in _ops_of_microbatch(plan) for copy in range(plan.k)
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


def _ops_of_microbatch(plan: Plan) -> Iterator[tuple[int, OpKind]]:
    last = len(plan.stages) - 1
    for stage, home in enumerate(plan.stages):
        yield stage, OpKind.F
        yield from ((stage, kind) for kind in _backward(home))
        if stage < last and plan.stages[stage + 1].gpu != home.gpu:
            yield stage, OpKind.SEND_F
            yield stage + 1, OpKind.SEND_B


def _backward(stage: Stage) -> tuple[OpKind, ...]:
    return (OpKind.I, OpKind.W) if stage.split_backward else (OpKind.B,)


def _host_ops(plan: Plan) -> Iterator[tuple[OpKind, int, int]]:
    """(H2): where a stage offloads, both ops of each copy that has one, and of one at least."""
    copies: dict[int, set[int]] = defaultdict(set)
    for op in plan.ops:
        if op.kind.is_host:
            copies[op.stage].add(op.copy_)
    for stage, home in enumerate(plan.stages):
        if home.offloads:
            for copy in copies[stage] or {0}:
                yield OpKind.OFFLOAD, stage, copy
                yield OpKind.PREFETCH, stage, copy
