"""The periodic schedule: rules `shifts`, `precedence`, `gpu`, `link`, `fifo`.

(R1) to (R5), (H3), (H4) of what goes to the host and comes back, (S1) of split backwards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise

from pipeplan.plan import OpKind
from pipeplan.verifier.durations import link
from pipeplan.verifier.moments import Hold
from pipeplan.verifier.stage_bytes import sends_whole_input
from pipeplan.verifier.timetable import TimedOp, Timetable
from pipeplan.verifier.violation import Rule, Violation


def shifts(table: Timetable) -> Iterator[Violation]:
    """(R1): every start lies in [0, T) and the plan's smallest shift is 0."""
    plan = table.plan
    for index, op in enumerate(plan.ops):
        if op.start_ns >= plan.period_ns:
            yield Violation(
                Rule.SHIFTS,
                f"op {op.label} (ops[{index}])",
                f"got start {op.start_ns} ns, need less than the period {plan.period_ns} ns",
            )
    smallest = min(plan.ops, key=lambda op: op.shift)
    if smallest.shift:
        yield Violation(
            Rule.SHIFTS,
            f"op {smallest.label}",
            f"got smallest shift {smallest.shift} of the plan, need 0",
        )


def precedence(table: Timetable) -> Iterator[Violation]:
    """(R2): an op of a micro-batch ends before its next one in chain order starts; (H3), (S1)."""
    for before, after in pairwise(table.order):
        for copy in range(table.plan.k):
            u, v = table[*before, copy], table[*after, copy]
            yield from _late(table, u, v, v.start)
    for stage in table.split:
        for copy in range(table.plan.k):
            u, v = table[OpKind.I, stage, copy], table[OpKind.W, stage, copy]
            yield from _late(table, u, v, v.start)
    hold = Hold(table)
    for stage, copies in table.offloaded.items():
        for copy in copies:
            forward, away = table[OpKind.F, stage, copy], table[OpKind.OFFLOAD, stage, copy]
            back, backward = table[OpKind.PREFETCH, stage, copy], table.backward(stage, copy)
            if sends_whole_input(table.plan, table.plan.stages[stage]):
                yield from _early(table, forward, away)
            else:
                yield from _late(table, forward, away, away.start)
            yield from _late(table, away, back, hold.post(back).time)
            yield from _late(table, back, backward, backward.start)


def _late(table: Timetable, u: TimedOp, v: TimedOp, begin: int) -> Iterator[Violation]:
    """Whether `u` ends after `begin`, the time at which `v` begins."""
    if u.end > begin:
        held = f" (its rank is busy from then to {v.start} ns)" if begin < v.start else ""
        yield Violation(
            Rule.PRECEDENCE,
            f"{u.label} -> {v.label} at {table.place(begin)}",
            f"{v.label} starts at {begin} ns{held}, need {u.end} ns, when {u.label} ends",
        )


def _early(table: Timetable, forward: TimedOp, away: TimedOp) -> Iterator[Violation]:
    """Whether the copy of an input begins before the forward that reads it."""
    if away.start < forward.start:
        yield Violation(
            Rule.PRECEDENCE,
            f"{forward.label} -> {away.label} at {table.place(away.start)}",
            f"{away.label} starts at {away.start} ns, need {forward.start} ns, when"
            f" {forward.label} starts: it is the input that leaves",
        )


def gpu(table: Timetable) -> Iterator[Violation]:
    """(R3): the computes of a GPU are disjoint modulo T."""
    busy: dict[int, list[TimedOp]] = defaultdict(list)
    for op in table.all:
        if op.kind.is_compute:
            busy[table.gpu(op)].append(op)
    for index in sorted(busy):
        yield from _disjoint(table, Rule.GPU, f"GPU {index}", busy[index])


def links(table: Timetable) -> Iterator[Violation]:
    """(R4), (H4): what a link or a GPU's way to the host carries is disjoint modulo T.

    What excludes each other, the duplex says.
    """
    busy: dict[tuple[int, int], list[TimedOp]] = defaultdict(list)
    ways: dict[str, list[TimedOp]] = defaultdict(list)
    links, host = table.plan.cluster.links, table.plan.cluster.host
    for op in table.all:
        if op.kind.is_send:
            busy[links.resource(*link(table.plan, op.kind, op.stage))].append(op)
        elif op.kind.is_host and host:
            way = {OpKind.OFFLOAD: "->", OpKind.PREFETCH: "<-"}[op.kind]
            joint = way if host.duplex == "full" else "-"
            ways[f"way GPU {table.gpu(op)} {joint} host"].append(op)
    joint = "->" if links.duplex == "full" else "-"
    for ends in sorted(busy):
        yield from _disjoint(table, Rule.LINK, f"link {ends[0]}{joint}{ends[1]}", busy[ends])
    for way in ways:
        yield from _disjoint(table, Rule.LINK, way, ways[way])


def _disjoint(
    table: Timetable, rule: Rule, what: str, ops: Iterable[TimedOp]
) -> Iterator[Violation]:
    """Each op against the one before it that lasts longest, around the period.

    Sorted by start, zero-length ops first among equals: an op overlaps an earlier one exactly when
    the furthest end so far lies behind its start; the furthest end of the last period, moved back
    by T, opens the sweep, so ops that wrap around, or exceed T themselves, are met as well.
    """
    period = table.period
    order = sorted((op.start % period, op.duration, op.position, op.copy, op) for op in ops)
    start, duration, _, _, holder = max(order, key=lambda entry: entry[0] + entry[1])
    reach = start + duration - period
    for start, duration, _, _, op in order:
        if reach > start:
            yield Violation(
                rule,
                f"{what} at {start} ns of the period",
                f"{op.label} starts {reach - start} ns before {holder.label} ends"
                f" ({start} ns, need {reach} ns)",
            )
        if start + duration > reach:
            reach, holder = start + duration, op


def fifo(table: Timetable) -> Iterator[Violation]:
    """(R5): every op handles the micro-batches that have it in index order."""
    for kind, stage, copies in table.kinds:
        for copy, other in zip(copies, (*copies[1:], copies[0]), strict=True):
            wraps = other <= copy
            u, v = table[kind, stage, copy], table[kind, stage, other]
            following = v.start + (table.period if wraps else 0)
            if u.end > following:
                later = f"{v.label} of the next period" if wraps else v.label
                yield Violation(
                    Rule.FIFO,
                    f"{u.label} -> {later} at {table.place(following)}",
                    f"{later} starts at {following} ns, need {u.end} ns, when {u.label} ends",
                )
