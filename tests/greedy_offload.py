"""Random valid plans that offload where a plan of `handmade_greedy` leaves the time for it.

What is free and what may follow what is tried instant by instant, straight from (H2) to (H4).
"""

from __future__ import annotations

from itertools import product
from random import Random

from pipeplan.cluster import Host
from pipeplan.plan import LayerRanges, Op, OpKind, Plan, Remat, Stage
from tests import handmade, handmade_greedy
from tests.handmade_greedy import Calendar
from tests.handmade_unrolled import PREFETCH, F, Unrolled, away_bytes, resource, whole_input


def random_plan(seed: int) -> Plan:
    """A plan of `handmade_greedy` in which most stages that can offload do."""
    plan = handmade_greedy.random_plan(seed)
    return offloading(Random(seed), plan) if plan.memory_model == "exact" else plan


def offloading(random: Random, plan: Plan) -> Plan:
    """`plan` in which most stages that can offload do."""
    host = Host(
        memory_bytes=10**6,
        bandwidth_bytes_per_s=random.choice((10**9, 3 * 10**9, 20 * 10**9)),
        duplex=random.choice(("full", "half")),
    )
    plan = handmade.with_(plan, cluster=plan.cluster.model_copy(update={"host": host}))
    calendar = Calendar(plan.period_ns)
    for stage in random.sample(plan.stages, len(plan.stages)):
        plan = _offload(random, plan, stage, calendar)
    return handmade.filled(plan)


def _offload(random: Random, plan: Plan, stage: Stage, calendar: Calendar) -> Plan:
    """`plan` whose `stage` offloads some copies, or as it was."""
    stages = list(plan.stages)
    enters = stage.id > 0 and random.random() < 0.5
    runs = () if enters and random.random() < 0.4 else _runs(random, stage)
    remat = Remat(offload=runs, offload_input=enters)
    stages[stage.id] = stage.model_copy(update={"remat": remat})
    sent = plan.model_copy(update={"stages": tuple(stages)})
    host, size = plan.cluster.host, away_bytes(sent, stage.id)
    assert host is not None
    length = -(-size * 10**9 // host.bandwidth_bytes_per_s)
    ops: list[tuple[Op, Op]] = []
    for copy in range(plan.k):
        if size and random.random() < 0.8:
            found = _pair(random, sent, (stage.id, copy, length), calendar, ops)
            ops += [found] if found else []
    if not ops:
        return plan
    return handmade.with_(sent, ops=(*plan.ops, *(op for pair in ops for op in pair)))


def _runs(random: Random, stage: Stage) -> LayerRanges:
    """One run, or each layer a run of its own."""
    if random.random() < 0.3:
        return tuple((layer, layer) for layer in range(stage.first, stage.last + 1))
    first, last = sorted(random.choices(range(stage.first, stage.last + 1), k=2))
    return ((first, last),)


def _pair(
    random: Random,
    plan: Plan,
    what: tuple[int, int, int],
    calendar: Calendar,
    before: list[tuple[Op, Op]],
) -> tuple[Op, Op] | None:
    """OFFLOAD and PREFETCH of one (stage, copy, length), booked; None where none are allowed."""
    (stage, copy, length), grid = what, Unrolled(plan)
    gpu, (starts, made) = plan.stages[stage].gpu, grid.time(F, stage, copy)
    begin = starts if whole_input(plan, stage) else made
    end = grid.time(grid.back(stage), stage, copy)[0]
    room = range(begin, end - length + 1)
    times = random.sample(room, min(len(room), 12))
    for there, back in product(times, times):
        ways = [resource(plan, kind, stage) for kind in (OpKind.OFFLOAD, PREFETCH)]
        apart = ways[0] != ways[1] or _apart(there, back, length, plan.period_ns)
        if (
            there + length <= grid.hold(gpu, back)
            and apart
            and calendar.free(ways[0], there, length)
            and calendar.free(ways[1], back, length)
            and all(
                _follows(pair[i], at, plan.period_ns)
                for pair in before
                for i, at in enumerate((there, back))
            )
        ):
            for way, at in zip(ways, (there, back), strict=True):
                calendar.book(way, at, length)
            return (
                _op(plan, OpKind.OFFLOAD, stage, copy, there, length),
                _op(plan, PREFETCH, stage, copy, back, length),
            )
    return None


def _apart(one: int, other: int, length: int, period: int) -> bool:
    """Whether two intervals of one length are disjoint modulo the period."""
    return length <= (one - other) % period <= period - length


def _follows(earlier: Op, start: int, period: int) -> bool:
    """(R5): behind an op of a copy before, and that of the next period behind this one."""
    begin = earlier.shift * period + earlier.start_ns
    return begin + earlier.duration_ns <= start <= begin + period - earlier.duration_ns


def _op(plan: Plan, kind: OpKind, stage: int, copy: int, start: int, length: int) -> Op:
    shift, begin = divmod(start, plan.period_ns)
    fields = {"start_ns": begin, "duration_ns": length, "shift": shift}
    return Op(kind=kind, stage=stage, copy=copy, gpu=plan.stages[stage].gpu, **fields)
