"""Offloading for random plans: hosts, runs, and times by earliest fit on the ways to the host."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random

from pipeplan.cluster import Host
from pipeplan.plan import LayerRanges, Op, OpKind, Plan, Remat, Stage
from pipeplan.verifier.durations import host_ns
from pipeplan.verifier.remat import runs as wrong_runs
from pipeplan.verifier.stage_bytes import offloaded, sends_whole_input

FACTORS = (1, 2, 4)
"""How much longer the period may become for the copies to fit."""


BANDWIDTHS = (10**9, 2 * 10**9, 3 * 10**9, 20 * 10**9)


def offloading(rng: Random, plan: Plan, bandwidths: Sequence[int] = BANDWIDTHS) -> Plan:
    """`plan` with a host, and stages that offload some or all of their micro-batches.

    Stages without bytes between the ends of a run, or without a gap, keep all. The host's memory
    is as large as it gets; `fit_host` sizes it.
    """
    host = Host(
        memory_bytes=2**40,
        bandwidth_bytes_per_s=rng.choice(bandwidths),
        duplex=rng.choice(["full", "half"]),
    )
    plan = plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"host": host})})
    # Draws of their own: plans without inputs that leave stay what they were.
    inputs = Random(f"{hash(rng.getstate()[1])} inputs")
    alone = Random(f"{hash(rng.getstate()[1])} inputs alone")
    wanted = [stage for stage in plan.stages if rng.random() < 0.7]
    stages = list(plan.stages)
    for stage in wanted:
        sending = _sending(rng, stage)
        entered = _with_input(_with_runs(stage, ()) if alone.random() < 0.4 else sending)
        allowed = not list(wrong_runs(plan, entered))
        stages[stage.id] = entered if allowed and inputs.random() < 0.6 else sending
    sent = plan.model_copy(update={"stages": tuple(stages)})
    homes = [s.id for s in wanted if stages[s.id].remat and offloaded(sent, stages[s.id])]
    copies = {s: {c for c in range(plan.k) if rng.random() < 0.8} or {0} for s in homes}
    for factor in FACTORS:
        ways = _Ways(rng, stretched(sent, factor))
        for home in rng.sample(homes, len(homes)):
            ways.place(home, sorted(copies[home]))
        if len(ways.ops) == len(homes):
            break
    return ways.plan_with(plan.stages)


def with_states_on_host(rng: Random, plan: Plan) -> Plan:
    """`plan`, which has a host, with the states of some stages there, or of none."""
    host = plan.cluster.host
    assert host is not None
    share = rng.choice([0, 0.5, 1])
    if not share:
        return plan
    host = host.model_copy(update={"update_bytes_per_s": rng.choice(BANDWIDTHS)})
    stages = tuple(
        stage.model_copy(update={"states": "host"}) if rng.random() < share else stage
        for stage in plan.stages
    )
    cluster = plan.cluster.model_copy(update={"host": host})
    return plan.model_copy(update={"cluster": cluster, "stages": stages})


def fit_host(rng: Random, plan: Plan) -> Plan:
    """`plan` with as much memory on its host as its table says, or a little more."""
    if plan.cluster.host is None:
        return plan
    needed = sum(row.host_bytes for row in plan.memory)
    host = plan.cluster.host.model_copy(update={"memory_bytes": needed + rng.choice([0, 0, 50])})
    return plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"host": host})})


def stretched(plan: Plan, factor: int) -> Plan:
    """`plan` with every time `factor` times as late: the gaps grow, the ops stay as long."""
    ops = tuple(op.model_copy(update={"start_ns": op.start_ns * factor}) for op in plan.ops)
    return plan.model_copy(update={"ops": ops, "period_ns": plan.period_ns * factor})


def _sending(rng: Random, stage: Stage) -> Stage:
    """The stage with random runs of the layers that it keeps."""
    held = stage.remat
    apart = [*held.recompute, *((layer, layer) for layer, _ in held.programs)] if held else []
    runs: list[tuple[int, int]] = []
    for layer in range(stage.first, stage.last + 1):
        if any(first <= layer <= last for first, last in apart) or rng.random() < 0.2:
            continue
        if runs and runs[-1][1] == layer - 1 and rng.random() < 0.7:
            runs[-1] = (runs[-1][0], layer)
        else:
            runs.append((layer, layer))
    return _with_runs(stage, tuple(runs))


def _with_runs(stage: Stage, runs: LayerRanges) -> Stage:
    held = stage.remat
    again, programs = (held.recompute, held.programs) if held else ((), ())
    remat = None
    if again or runs or programs:
        remat = Remat(recompute=again, offload=runs, programs=programs)
    return stage.model_copy(update={"remat": remat})


def _with_input(stage: Stage) -> Stage:
    """The stage with its saved input among what leaves, whether or not that may be."""
    held = stage.remat or Remat(offload_input=True)
    return stage.model_copy(update={"remat": held.model_copy(update={"offload_input": True})})


@dataclass
class _Ways:
    """The copies that have found their times beside the computes of `plan`."""

    rng: Random
    plan: Plan
    ops: dict[int, list[Op]] = field(default_factory=dict)
    """By stage, OFFLOAD and PREFETCH of one micro-batch after the other."""
    taken: dict[object, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """By way, (start, length) of what it carries."""
    busy: dict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """By GPU, (start, length) of its computes."""

    def __post_init__(self) -> None:
        # Draws of its own: plans without inputs that leave early stay what they were.
        self.early = Random(f"{hash(self.rng.getstate()[1])} early")
        for op in self.plan.ops:
            if op.gpu is not None:
                self.busy[op.gpu].append((op.start_ns, op.duration_ns))

    def plan_with(self, stages: tuple[Stage, ...]) -> Plan:
        """The plan with all of them; stages that found no time are as in `stages`."""
        kept = [self.plan.stages[s.id] if s.id in self.ops else s for s in stages]
        ops = [*self.plan.ops, *(op for each in self.ops.values() for op in each)]
        self.rng.shuffle(ops)
        return self.plan.model_copy(update={"stages": tuple(kept), "ops": tuple(ops)})

    def place(self, stage: int, copies: list[int]) -> None:
        """Each micro-batch behind the one before, unless it finds no time."""
        length = host_ns(self.plan, stage)
        for copy in copies:
            before = self.ops.get(stage, [])
            found = next(self._pairs(stage, copy, length, before), None)
            if found is None:
                continue
            self.ops[stage] = [*before]
            for kind, time in zip((OpKind.OFFLOAD, OpKind.PREFETCH), found, strict=True):
                self.taken[self._way(kind, stage)].append((time, length))
                self.ops[stage].append(self._op(kind, stage, copy, time, length))

    def _pairs(
        self, stage: int, copy: int, length: int, before: list[Op]
    ) -> Iterator[tuple[int, int]]:
        """Times of OFFLOAD and PREFETCH that (H3), (H4) and (R5) allow."""
        gpu, period = self.plan.stages[stage].gpu, self.plan.period_ns
        begin = self._end(OpKind.F, stage, copy)
        if sends_whole_input(self.plan, self.plan.stages[stage]) and self.early.random() < 0.7:
            begin = self._start(OpKind.F, stage, copy)
        end = self._start(self.plan.stages[stage].backward, stage, copy)
        begin += self.rng.randint(0, period) * (self.rng.random() < 0.2)
        late = self.rng.random() < 0.5
        half = self._way(OpKind.OFFLOAD, stage) == self._way(OpKind.PREFETCH, stage)
        firsts = self._free(OpKind.OFFLOAD, stage, length, range(begin, end), before)
        for there in islice(firsts, 12):
            first, last = there + length, end - length
            backs = range(max(first, last - period), last + 1) if late else range(first, last + 1)
            for back in self._free(OpKind.PREFETCH, stage, length, backs, before):
                if half and _overlap(period, there, length, back, length):
                    continue
                if there + length <= self._hold(gpu, back):
                    yield there, back

    def _free(
        self, kind: OpKind, stage: int, length: int, times: range, before: list[Op]
    ) -> Iterator[int]:
        """Of `times`, those of one period, when the way is free and (R5) is kept."""
        period = self.plan.period_ns
        taken = self.taken[self._way(kind, stage)]
        earlier = [self._time(op) for op in before if op.kind is kind]
        for time in times[:period]:
            busy = any(_overlap(period, time, length, at, size) for at, size in taken)
            in_order = not earlier or earlier[-1] + length <= time <= earlier[0] + period - length
            if length <= period and not busy and in_order:
                yield time

    def _way(self, kind: OpKind, stage: int) -> object:
        host = self.plan.cluster.host
        shared = host is not None and host.duplex == "half"
        return self.plan.stages[stage].gpu, None if shared else kind

    def _hold(self, gpu: int, time: int) -> int:
        """(O1)."""
        for start, length in self.busy[gpu]:
            since = (time - start) % self.plan.period_ns
            if 0 < since < length:
                return time - since
        return time

    def _time(self, op: Op) -> int:
        return op.shift * self.plan.period_ns + op.start_ns

    def _find(self, kind: OpKind, stage: int, copy: int) -> Op:
        wanted = kind, stage, copy
        return next(op for op in self.plan.ops if (op.kind, op.stage, op.copy_) == wanted)

    def _start(self, kind: OpKind, stage: int, copy: int) -> int:
        return self._time(self._find(kind, stage, copy))

    def _end(self, kind: OpKind, stage: int, copy: int) -> int:
        return self._start(kind, stage, copy) + self._find(kind, stage, copy).duration_ns

    def _op(self, kind: OpKind, stage: int, copy: int, time: int, length: int) -> Op:
        shift, start = divmod(time, self.plan.period_ns)
        return Op(
            kind=kind,
            stage=stage,
            copy_=copy,
            gpu=self.plan.stages[stage].gpu,
            start_ns=start,
            duration_ns=length,
            shift=shift,
        )


def _overlap(period: int, a: int, a_length: int, b: int, b_length: int) -> bool:
    """Whether two intervals with length share an instant modulo the period."""
    return (b - a) % period < a_length or (a - b) % period < b_length
