"""Times for random plans: each op at the first free time modulo the period, after some slack."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from pipeplan.plan import Op, OpKind, Plan
from pipeplan.verifier.durations import compute_ns, transfer_ns
from pipeplan.verifier.recompute import without_runs
from pipeplan.verifier.structure import chain_order, place


@dataclass
class _Resource:
    """What a GPU or a link does in one period."""

    period: int
    taken: list[tuple[int, int]] = field(default_factory=list)

    def first_free(self, earliest: int, latest: int, length: int) -> int | None:
        """The first start, of those up to the latest, at which an op overlaps no other."""
        start = earliest
        while start <= latest and length <= self.period:
            waits = (self._wait(start, length, *other) for other in self.taken)
            wait = next(filter(None, waits), 0)
            if not wait:
                return start
            start += wait
        return None

    def _wait(self, a: int, a_length: int, b: int, b_length: int) -> int:
        """By how much an op at `a` starts too early to miss one at `b`, at least; 0: they miss."""
        after, before = (b - a) % self.period, (a - b) % self.period
        if a_length and b_length:
            if before < b_length:
                return b_length - before
            return after + b_length if after < a_length else 0
        if 0 < before < b_length:
            return b_length - before
        return after if 0 < after < a_length else 0


def ops_lengths(plan: Plan) -> dict[tuple[OpKind, int], int]:
    """What each op of a micro-batch lasts, in chain order, then every W."""
    flat = without_runs(plan)
    halves = [(OpKind.W, stage.id) for stage in plan.stages if stage.split_backward]
    return {
        (kind, stage): (compute_ns if kind.is_compute else transfer_ns)(flat, kind, stage)
        for kind, stage in [*chain_order(plan), *halves]
    }


def with_times(rng: Random, plan: Plan) -> Plan:
    """Places each op at the first free time after its predecessor and some slack."""
    lengths = ops_lengths(plan)
    load: dict[object, int] = {}
    for kind, stage in lengths:
        resource = resource_of(plan, kind, stage)
        load[resource] = load.get(resource, 0) + plan.k * lengths[kind, stage]
    period = max(1, *load.values()) + rng.choice([0, 0, 1, 3, 10])
    slack = rng.choice([0, 0, 1, 4, 2 * period])
    tries = 0
    while True:
        plan = _with(plan, period_ns=period)
        times = _place(rng, plan, lengths, slack)
        if times is not None:
            return _with(plan, ops=timed_ops(rng, plan, lengths, times))
        tries += 1
        period += 1 + tries


def resource_of(plan: Plan, kind: OpKind, stage: int) -> object:
    """The GPU or link that an op excludes others on."""
    where = place(plan, kind, stage)
    return where if isinstance(where, int) else plan.cluster.links.resource(*where)


Times = dict[tuple[OpKind, int, int], int]


def _place(
    rng: Random, plan: Plan, lengths: dict[tuple[OpKind, int], int], slack: int
) -> Times | None:
    period = plan.period_ns
    resources: dict[object, _Resource] = {}
    times: Times = {}
    for copy in range(plan.k):
        ready = rng.randrange(period) if copy == 0 else 0
        for (kind, stage), length in lengths.items():
            if kind is OpKind.W:
                ready = times[OpKind.I, stage, copy] + lengths[OpKind.I, stage]
            resource = resources.setdefault(resource_of(plan, kind, stage), _Resource(period))
            earliest = ready + rng.randint(0, slack) * (rng.random() < 0.3)
            latest = earliest + period - 1
            if copy:
                earliest = max(earliest, times[kind, stage, copy - 1] + length)
                latest = times[kind, stage, 0] + period - length * (plan.k - copy)
            start = resource.first_free(earliest, latest, length)
            if start is None:
                return None
            resource.taken.append((start, length))
            times[kind, stage, copy] = start
            ready = start + length
    return times


def timed_ops(
    rng: Random, plan: Plan, lengths: dict[tuple[OpKind, int], int], times: Times
) -> tuple[Op, ...]:
    """The ops of `plan` at absolute `times`, in any order."""
    ops = []
    first = min(times.values()) // plan.period_ns
    for (kind, stage, copy), time in times.items():
        shift, start = divmod(time, plan.period_ns)
        where = place(plan, kind, stage)
        ops.append(
            Op(
                kind=kind,
                stage=stage,
                copy_=copy,
                gpu=where if isinstance(where, int) else None,
                link=where if isinstance(where, tuple) else None,
                start_ns=start,
                duration_ns=lengths[kind, stage],
                shift=shift - first,
            )
        )
    rng.shuffle(ops)
    return tuple(ops)


def _with(plan: Plan, **fields: object) -> Plan:
    return plan.model_copy(update=fields)
