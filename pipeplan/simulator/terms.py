"""The byte ledger term by term: whom the bytes of each level are for.

`ledger` says how many bytes a rank holds after each event; here each event moves things of known
size between terms. The terms must add up to what the ledger says, at every instant that is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from pipeplan.errors import InputError, InternalError
from pipeplan.memory_terms import Curve, GpuTerms, Instant, Key, Purpose, Term, terms_of
from pipeplan.plan import OpKind, Plan
from pipeplan.program import Action
from pipeplan.simulator import costs
from pipeplan.simulator.charges import Charges, handovers, result_bytes
from pipeplan.simulator.ledger import Level
from pipeplan.simulator.riding import Once
from pipeplan.simulator.tape import Does, Entry, Ops, number
from pipeplan.units import MAX_INT

P = Purpose
_WORK = {OpKind.F: P.WORK_F, OpKind.B: P.WORK_B, OpKind.I: P.WORK_I, OpKind.W: P.WORK_W}
_Moves = list[tuple[Key, int]]
"""Things that come (+1) and go (-1)."""


@dataclass(frozen=True, slots=True)
class Things:
    """What the ops of a plan bring and take away, in bytes of one micro-batch."""

    start: dict[int, _Moves]
    end: dict[int, _Moves]
    passing: dict[tuple[int, int], _Moves]
    """(Does, op): what a rank does beside its computes."""
    update: dict[int, Key]
    """By B (or I): the workspace of its stage's optimizer."""
    whole: dict[int, Key]
    """By stage: what a micro-batch keeps that has nothing on the host."""
    leaving: dict[int, tuple[tuple[int, int], ...]]
    """By stage that offloads: (stage, bytes of what that keeps) of a micro-batch."""
    host: dict[int, Key]
    for_weights: dict[int, tuple[Key, Key]]
    """By stage: what waits for W, alone and with what the stage before still counts left out."""

    @classmethod
    def of(cls, plan: Plan, ops: Ops, once: Mapping[int, Once]) -> Things:
        """All things of the plan's memory model; of stages in `once` as that says."""
        made = cls({}, {}, {}, {}, {}, {}, {}, {})
        for stage in range(len(plan.stages)):
            made._take_stage(plan, ops, stage, once.get(stage))
            if plan.stages[stage].split_backward:
                made._take_weights(plan, stage)
        for producer, transfer, consumer in handovers(ops):
            made._take_handover(plan, producer, transfer, consumer, once)
        return made

    def _take_stage(self, plan: Plan, ops: Ops, stage: int, once: Once | None) -> None:
        paper = plan.memory_model == "paper"
        size = (costs.paper_bytes if paper else costs.live_stage_bytes)(plan, stage)
        size = once.size if once else size
        forward, backward = number(OpKind.F, stage), ops.backward(stage)
        self.whole[stage] = key = (P.SAVED, stage, size.kept)
        (self.end if paper else self.start).setdefault(forward, []).append((key, 1))
        for op, running in ((forward, size.forward), (backward, size.backward)):
            work = (_WORK[ops.kind(op)], stage, running if paper else running - size.kept)
            self.start.setdefault(op, []).append((work, 1))
            self.end.setdefault(op, []).append((work, -1))
        self.end[backward].append((key, -1))
        self.update[backward] = (P.UPDATE, stage, costs.update_bytes(plan, stage))
        if (away := costs.offloaded_bytes(plan, stage)) and plan.cluster.host is not None:
            shared = costs.offloaded_output_bytes(plan, stage)
            self.leaving[stage] = ((stage, away - shared), (stage - 1, shared))
            self.host[stage] = (P.SAVED, stage, away)

    def _take_weights(self, plan: Plan, stage: int) -> None:
        size = costs.live_weight_bytes(plan, stage)
        alone, shared = size.kept, size.kept - size.shared
        self.for_weights[stage] = (P.SAVED_FOR_W, stage, alone), (P.SAVED_FOR_W, stage, shared)
        op, work = number(OpKind.W, stage), (P.WORK_W, stage, size.running - size.kept)
        self.start[op] = [(work, 1)]
        self.end[op] = [(work, -1)]

    def _take_handover(
        self,
        plan: Plan,
        producer: int,
        transfer: int | None,
        consumer: int,
        once: Mapping[int, Once],
    ) -> None:
        forward, stage = Ops.kind(producer) is OpKind.F, Ops.stage(producer)
        alone = forward and stage in once
        result = once[stage].output if alone else result_bytes(plan, producer)
        if transfer is None:
            key = (P.DIRECT_F if forward else P.DIRECT_B, stage, result)
            self.end.setdefault(producer, []).append((key, 1))
            self.start.setdefault(consumer, []).append((key, -1))
        elif plan.memory_model == "exact":
            whole = costs.message_bytes(plan, Ops.kind(transfer), Ops.stage(transfer))
            sent = (P.SENT_F if forward else P.SENT_B, stage, result)
            come = (P.RECEIVED_F if forward else P.RECEIVED_B, Ops.stage(consumer), whole)
            self.end.setdefault(producer, []).append((sent, 1))
            self.passing[Does.FREE, transfer] = [(sent, -1)]
            self.passing[Does.RECV, transfer] = [(come, 1)]
            self.start.setdefault(consumer, []).append((come, -1))


class TermLedger:
    """What one rank holds, followed level by level."""

    def __init__(self, things: Things, charges: Charges, ops: Ops, tape: list[Entry]) -> None:
        self._things, self._charges, self._ops, self._tape = things, charges, ops, tape
        self.counts: dict[Key, int] = {}
        self.host: dict[Key, int] = {}
        self._away: set[tuple[int, int]] = set()
        self._gone: dict[tuple[int, int], int] = {}
        """Bytes of (stage, micro-batch) that are given up now."""
        self._shared: set[tuple[int, int]] = set()
        self._updating = False

    def follow(self, level: Level) -> None:
        """Takes in the next level."""
        does, op, microbatch = self._tape[level.entry]
        stage = Ops.stage(op)
        if does == Does.COMPUTE and level.is_end:
            self._end(op, stage, microbatch)
        elif does == Does.COMPUTE:
            self._start(op, stage, microbatch)
        elif does == Does.OPT:
            self._updating = not self._updating
            self._move(self._things.update[op], 1 if self._updating else -1)
        elif Ops.kind(op).is_host:
            self._pass_host(does, stage, microbatch)
        else:
            self._apply(self._things.passing.get((does, op), ()))

    def _start(self, op: int, stage: int, microbatch: int) -> None:
        if op == self._ops.backward(stage):
            if (stage, microbatch) in self._away:
                self._away.remove((stage, microbatch))
                self._put(self.host, self._things.host[stage], -1)
            self._unshare(stage + 1, microbatch)
        self._apply(self._things.start[op])

    def _end(self, op: int, stage: int, microbatch: int) -> None:
        self._apply(self._things.end[op])
        kind = Ops.kind(op)
        if kind is OpKind.I:
            alone, shared = self._things.for_weights[stage]
            if self._charges.shared[op]:
                self._shared.add((stage, microbatch))
            self._move(shared if self._charges.shared[op] else alone, 1)
        elif kind is OpKind.W:
            self._unshare(stage, microbatch)
            self._move(self._things.for_weights[stage][0], -1)

    def _unshare(self, stage: int, microbatch: int) -> None:
        if (stage, microbatch) in self._shared:
            self._shared.remove((stage, microbatch))
            alone, shared = self._things.for_weights[stage]
            self._move(shared, -1)
            self._move(alone, 1)

    def _pass_host(self, does: int, stage: int, microbatch: int) -> None:
        if does == Does.OFFLOAD:
            self._away.add((stage, microbatch))
            self._put(self.host, self._things.host[stage], 1)
            return
        for owner, size in self._things.leaving[stage]:
            self._lose(owner, microbatch, size if does == Does.FREE else -size)

    def _lose(self, stage: int, microbatch: int, size: int) -> None:
        """Of what a micro-batch keeps, so many bytes more are away."""
        if size:
            purpose, _, whole = self._things.whole[stage]
            before = self._gone.pop((stage, microbatch), 0)
            if before + size:
                self._gone[stage, microbatch] = before + size
            self._move((purpose, stage, whole - before), -1)
            self._move((purpose, stage, whole - before - size), 1)

    def _apply(self, moves: Iterable[tuple[Key, int]]) -> None:
        for key, change in moves:
            self._move(key, change)

    def _move(self, key: Key, change: int) -> None:
        self._put(self.counts, key, change)

    @staticmethod
    def _put(counts: dict[Key, int], key: Key, change: int) -> None:
        if key[2]:
            counts[key] = counts.get(key, 0) + change
            if not counts[key]:
                del counts[key]


@dataclass(slots=True)
class _Worst:
    """The worst instant of one kind of action so far."""

    size: int
    framed: bool
    time: int
    place: int
    """Of how many levels before it."""
    action: str
    counts: dict[Key, int]


def gpu_memory(
    levels: Iterator[Level],
    ledger: TermLedger,
    always: list[Key],
    on_host: list[Key],
    actions: tuple[Action, ...],
    frame: tuple[int, int] | None,
    *,
    once: bool,
) -> GpuTerms:
    """The terms of one rank at the worst instant of each kind of action, and over time.

    Of instants as large the first within the frame counts, as in `measure.Peaks`.

    Args:
        levels: of the rank's ledger, which `ledger` follows.
        ledger: that has seen none of them.
        always: what the rank holds all the time.
        on_host: what it has in the host's memory all the time.
        actions: of its tape.
        frame: the period that stands for all; None takes the whole replay.
        once: whether terms count storages once that the ledger counts several times.

    Raises:
        InternalError: if terms do not add up to the ledger's bytes, or to more.
    """
    worst: dict[str, _Worst] = {}
    begin, end = frame or (0, 2**63)
    curve: list[tuple[int, dict[Key, int]]] = [(0, {})]
    away: dict[Key, int] = {}
    for place, level in enumerate(levels):
        ledger.follow(level)
        if _size(ledger.host) > _size(away):
            away = dict(ledger.host)
        if not level.counts:
            continue
        framed = begin <= level.time < end
        if level.time <= begin:
            curve[0] = (0, dict(ledger.counts))
        elif framed:
            curve.append((level.time - begin, dict(ledger.counts)))
        action = actions[level.entry]
        found = _size(ledger.counts) if once else level.total
        if found > level.total:
            raise _differ(str(action), found, level.total)
        kind = f"{action.stage}{action.kind}"
        known = worst.get(kind)
        if known is None or (found, framed) > (known.size, known.framed):
            name = f"end of {action}" if level.is_end else str(action)
            worst[kind] = _Worst(found, framed, level.time, place, name, dict(ledger.counts))
    _check(worst.values())
    last = max((each.time for each in worst.values()), default=begin) - begin
    if last > MAX_INT:
        raise InputError(
            f"replay: got a peak {last} ns after the first action, need at most {MAX_INT}."
            " Check that the times of the plan are ns."
        )
    ranked = sorted(worst.values(), key=lambda each: (-each.size, not each.framed, each.place))
    instants = tuple(
        Instant(
            time_ns=max(0, each.time - begin),
            action=each.action,
            terms=_terms(each.counts, always),
        )
        for each in ranked
    )
    idle = (Instant(time_ns=0, action="", terms=_terms({}, always)),)
    return GpuTerms(
        instants=instants or idle, host=_terms(away, on_host), curve=_curve(curve, always)
    )


def _check(found: Iterable[_Worst]) -> None:
    for each in found:
        if _size(each.counts) != each.size:
            raise _differ(each.action, _size(each.counts), each.size)


def _differ(action: str, found: int, told: int) -> InternalError:
    return InternalError(
        f"replay: {action}: terms add up to {found} bytes, the ledger says {told}."
        " Report this plan."
    )


def _size(counts: dict[Key, int]) -> int:
    return sum(key[2] * count for key, count in counts.items())


def _terms(counts: dict[Key, int], always: list[Key]) -> tuple[Term, ...]:
    found = dict(counts)
    for key in always:
        if key[2]:
            found[key] = found.get(key, 0) + 1
    return terms_of(found)


def _curve(points: list[tuple[int, dict[Key, int]]], always: list[Key]) -> Curve:
    """By purpose; of several levels at one time the largest and the last stay."""
    base: dict[Purpose, int] = {}
    for key in always:
        base[key[0]] = base.get(key[0], 0) + key[2]
    rows = []
    for time, counts in points:
        row = dict(base)
        for key, count in counts.items():
            row[key[0]] = row.get(key[0], 0) + key[2] * count
        rows.append((time, row))
    return Curve.of(rows)
